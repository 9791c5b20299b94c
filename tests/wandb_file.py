"""Reads a `.wandb` file: LevelDB's log format, a protobuf Record in each entry."""

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

_BLOCK, _HEADER = 32768, 7  # bytes
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


class WandbFile(NamedTuple):
    id: str
    config: dict[str, Any]
    tags: list[str]
    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    step_metrics: list[tuple[str, str]]  # (glob, the metric that is its x axis)
    exit_code: int | None
    artifacts: list[str]


def read(path: Path) -> WandbFile:
    from wandb.proto import wandb_internal_pb2

    run_id, config, tags, rows, summary, metrics, exit_code, artifacts = "", {}, [], [], {}, [], None, []
    for data in _entries(path.read_bytes()):
        record: Any = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run_id, tags = record.run.run_id, list(record.run.tags)
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if kind == "history":
            rows.append({_key(item): json.loads(item.value_json) for item in record.history.item})
        if kind == "summary":
            summary |= {_key(item): json.loads(item.value_json) for item in record.summary.update}
        if kind == "metric" and record.metric.step_metric:
            metrics.append((record.metric.name or record.metric.glob_name, record.metric.step_metric))
        if kind == "exit":
            exit_code = record.exit.exit_code
        if kind == "request" and record.request.HasField("log_artifact"):
            artifacts.append(record.request.log_artifact.artifact.name)
        if kind == "artifact":
            artifacts.append(record.artifact.name)
    return WandbFile(run_id, config, tags, rows, summary, metrics, exit_code, artifacts)


def _key(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


def _entries(data: bytes) -> list[bytes]:
    entries, parts, at = [], [], _HEADER  # the file starts with 7 bytes of its own, which belong to the first block
    while at < len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:  # too little for a header: padding
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        at += _HEADER
        if kind in (_FULL, _FIRST):
            parts = []
        parts.append(data[at : at + size])
        at += size
        if kind in (_FULL, _LAST):
            entries.append(b"".join(parts))
    return entries
