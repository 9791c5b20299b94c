"""Reports and saved workspaces on the stand-in for W&B's server (tests/loggers/wandb_standin.py): saved, and found again."""

import base64
import json
from collections.abc import Iterator
from typing import Any

ENTITY = "someone"


class Views:
    """`answer` takes the place of the stand-in's own, which it asks of all else."""

    def __init__(self, ask: Any, project: str):
        self._ask, self._project = ask, project
        self.saved: dict[str, dict[str, Any]] = {}  # by id: type, name, displayName, description, spec
        self.num_saves = 0

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [view | {"spec": json.loads(view["spec"])} for view in self.saved.values() if view["type"] == kind]

    def answer(self, runs: Any, query: str, variables: Any, url: str) -> dict[str, Any]:
        project = {"id": "p", "internalId": "7", "name": self._project, "entityName": ENTITY}
        if "upsertView(" in query and "mutation" in query:
            return {"upsertView": {"view": self._save(variables) | {"project": project}, "inserted": True}}
        if "projectInternalId" in query or "ProjectInternalId" in query:
            known = variables["projectName"] == self._project
            return {"project": project if known else None}
        if "allViews" in query:  # reports, or a workspace by its name
            kind, name = variables.get("viewType", "runs"), variables.get("viewName")
            found = [v for v in self.saved.values() if v["type"] == kind and name in (None, v["name"])]
            edges = [{"node": v | {"user": None}, "cursor": v["id"]} for v in found]
            return {"project": {"allViews": {"edges": edges, "pageInfo": {"endCursor": None, "hasNextPage": False}}}}
        if "SpecificReport" in query:
            return {"view": self.saved[variables["reportId"]] | {"project": project}}
        if "GetProjects" in query:
            node = project | {"createdAt": "2026-01-01T00:00:00Z", "isBenchmark": False, "user": None}
            page = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
            return {"models": {"pageInfo": page, "edges": [{"node": node | {"__typename": "Project"}}]}}
        if "viewer" in query:
            return {"viewer": {"id": "u", "entity": ENTITY, "username": ENTITY, "flags": "{}", "teams": {"edges": []}}}
        return self._ask(runs, query, variables, url)

    def _save(self, given: dict[str, Any]) -> dict[str, Any]:
        assert given["entityName"] == ENTITY and given["projectName"] == self._project
        id_ = given.get("id") or base64.b64encode(f"View:{len(self.saved)}".encode()).decode()
        self.num_saves += 1
        at = {"createdAt": "2026-01-01T00:00:00Z", "updatedAt": "2026-01-01T00:00:00Z"}
        fields = {name: given[name] for name in ("type", "name", "displayName", "description", "spec")}
        self.saved[id_] = {"id": id_, **fields, **at}
        return self.saved[id_]


def panels(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All of a report, or of a workspace."""
    if "section" in spec:
        for section in spec["section"]["panelBankConfig"]["sections"]:
            yield from section["panels"]
    for block in spec.get("blocks", []):
        if block["type"] == "panel-grid":
            yield from block["metadata"]["panelBankSectionConfig"]["panels"]


def run_sets(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "section" in spec:
        yield from spec["section"]["runSets"]
    for block in spec.get("blocks", []):
        if block["type"] == "panel-grid":
            yield from block["metadata"]["runSets"]


def texts(node: Any) -> Iterator[str]:
    """All that is to be read in a report."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name in ("text", "content") and isinstance(value, str):
                yield value
            else:
                yield from texts(value)
    elif isinstance(node, list):
        for one in node:
            yield from texts(one)
