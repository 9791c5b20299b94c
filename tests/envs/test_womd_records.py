"""Records of the Waymo Open Motion Dataset: what is written is read, each process reads its own, and what is damaged is told."""

import re
import shutil
import struct
import sys

import numpy as np
import pytest

from rlexp.config import ConfigError
from rlexp.envs.womd import example, features, generate, tfrecord
from rlexp.envs.womd.__main__ import main

NUM = 5


@pytest.fixture(scope="module")
def drives():
    """Records of numbers that mean nothing."""
    rng, sizes = np.random.default_rng(0), {"points": 50, "paths": 3, "path_points": 20}

    def values(feature):
        shape = [sizes.get(n, n) for n in feature.shape]
        if feature.dtype == np.float32:
            return rng.normal(scale=1e3, size=shape).astype(np.float32)
        if feature.dtype == np.int64:
            return rng.integers(-(2**63), 2**63 - 1, shape)
        return np.array([rng.bytes(9)], object)

    return [{name: values(feature) for name, feature in features.TABLE.items()} for _ in range(NUM)]


@pytest.fixture(scope="module")
def folder(drives, tmp_path_factory):
    """Three records in one file, two in another."""
    place = tmp_path_factory.mktemp("womd")
    features.write(place / "some.tfrecord-00000-of-00002", drives[:3])
    features.write(place / "some.tfrecord-00001-of-00002", drives[3:])
    return place


def test_what_is_written_is_read(drives, folder):
    read = list(features.read(str(folder)))
    assert [number for number, *_ in read] == list(range(NUM))
    for wrote, (_, _, found) in zip(drives, read, strict=True):
        assert wrote.keys() == found.keys() == features.TABLE.keys()
        for name, values in wrote.items():
            assert found[name].dtype == values.dtype, name
            np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_each_record_is_read_by_one_process_and_a_bound_is_of_all(folder):
    for processes in (2, 3, 7):
        shares = [[n for n, *_ in features.read(str(folder), process=p, processes=processes)] for p in range(processes)]
        assert shares == [[n for n in range(NUM) if n % processes == p] for p in range(processes)]
    assert [n for n, *_ in features.read(str(folder / "*00001*"), process=1, processes=2)] == [1]
    assert [n for n, *_ in features.read(str(folder), process=1, processes=2, most=3)] == [1]


def test_checksums_are_those_of_tfrecord(tmp_path):
    """CRC-32C of b"123456789" is 0xe3069283 (RFC 3720's polynomial), masked as TensorFlow's format says."""
    tfrecord.write(tmp_path / "one", [b"123456789"])
    crc = 0xE3069283
    masked = ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) % 2**32
    data = (tmp_path / "one").read_bytes()
    assert data[:8] == struct.pack("<Q", 9)
    assert data[12:21] == b"123456789"
    assert struct.unpack("<I", data[21:])[0] == masked


def nested(number: int, payload: bytes) -> bytes:
    """A field of bytes or of a message."""
    return bytes([number << 3 | 2, len(payload)]) + payload


def test_an_example_is_what_the_wire_format_says():
    minus_one = b"\xff" * 9 + b"\x01"
    pairs = {
        b"a": nested(3, nested(1, b"\x01" + minus_one + b"\x00")),  # int64, 1, -1 and 0
        b"b": nested(2, nested(1, struct.pack("<f", 1.5))),
        b"c": nested(1, nested(1, b"x") + nested(1, b"yz")),
    }
    by_hand = nested(1, b"".join(nested(1, nested(1, name) + nested(2, value)) for name, value in pairs.items()))
    made = {
        "b": np.array([1.5], np.float32),
        "c": np.array([b"x", b"yz"], object),
        "a": np.array([1, -1, 0]),
    }
    assert example.encode(made) == by_hand
    read = example.decode(by_hand)
    assert {k: (v.dtype.kind, v.tolist()) for k, v in read.items()} == {
        "a": ("i", [1, -1, 0]),
        "b": ("f", [1.5]),
        "c": ("O", [b"x", b"yz"]),
    }
    # a list that is not packed, which is allowed; and a feature without values, which is none
    not_packed = nested(2, b"\x0d" + struct.pack("<f", 1.5) + b"\x0d" + struct.pack("<f", -2.0))
    assert example.decode(nested(1, nested(1, nested(1, b"b") + nested(2, not_packed))))["b"].tolist() == [1.5, -2.0]
    assert example.decode(nested(1, nested(1, nested(1, b"b") + nested(2, b"")))) == {}


def without(name):
    return lambda record: {k: v for k, v in record.items() if k != name}


def with_it(name, change):
    return lambda record: record | {name: change(record[name])}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("state/current/x"), r"state/current/x is missing$"),
        (without("path_samples/xyz"), r"path_samples/xyz is missing$"),
        (
            lambda r: without("state/type")(r) | {"state/tipe": r["state/type"]},
            r'state/type is missing; did you mean "state/tipe"\?$',
        ),
        (
            with_it("state/past/y", lambda x: x[:, :9]),
            r"state/past/y has 1,152 values; expected the shape \[128, 10\]$",
        ),
        (
            with_it("roadgraph_samples/xyz", lambda x: x[:-1]),
            r"roadgraph_samples/xyz has 147 values; expected the shape \[50, 3\]$",
        ),
        (
            with_it("path_samples/valid", lambda x: x.ravel()[1:]),
            r"path_samples/valid has 59 values; expected the shape \[3, path_points\]$",
        ),
        (
            with_it("state/is_sdc", lambda x: x.astype(np.float32)),
            r"state/is_sdc has values of type float; expected int64$",
        ),
    ],
)
def test_a_record_that_is_none_of_the_format_s(change, said, drives, tmp_path):
    tfrecord.write(tmp_path / "a.tfrecord", [example.encode(drives[0]), example.encode(change(drives[1]))])
    where = re.escape(f"env.path: {str(tmp_path / 'a.tfrecord')!r}, record 1: ")
    with pytest.raises(ConfigError, match=f"^{where}{said}"):
        list(features.read(str(tmp_path)))


def test_records_of_before_the_paths_are_read(drives, tmp_path):
    old = {k: v for k, v in drives[0].items() if not k.startswith("path_samples/") and not k.endswith("/speed")}
    tfrecord.write(tmp_path / "a.tfrecord", [example.encode(old | {"something/else": np.array([1])})])
    ((_, _, found),) = features.read(str(tmp_path / "a.tfrecord"))
    assert found.keys() == old.keys()


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d[:-1], "record 1 is cut short: 7 of 8 bytes are there"),
        (lambda d: d[: len(d) // 2 + 5], "record 1 is cut short, within its length"),
        (lambda d: flipped(d, len(d) - 6), "record 1 has a wrong checksum; it is damaged"),
        (lambda d: flipped(d, 0), "record 0 has a length with a wrong checksum; it is damaged, or no TFRecord"),
        (lambda d: b"\x1f\x8b" + d, "record 0 has a length with a wrong checksum; it is damaged, or no TFRecord"),
    ],
)
def test_files_that_are_damaged(change, said, tmp_path):
    path = tmp_path / "a.tfrecord"
    tfrecord.write(path, [b"abcd", b"efgh"])
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ConfigError, match=f"^env.path: {re.escape(repr(str(path)))}, {re.escape(said)}$"):
        list(tfrecord.records([path]))


def test_a_record_that_is_no_example(tmp_path):
    tfrecord.write(tmp_path / "a.tfrecord", [b"\xff\xff\xff"])
    with pytest.raises(ConfigError, match=r"record 0 is no tf\.train\.Example$"):
        list(features.read(str(tmp_path)))


def test_what_is_not_there_is_told_with_what_is(folder, tmp_path):
    with pytest.raises(
        ConfigError, match=r"^env\.path: '.*/other\*' is not there; in '.*' there are some\.tfrecord-00000"
    ):
        tfrecord.files(str(folder / "other*"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r'has no file with "tfrecord" in its name; .* is empty$'):
        tfrecord.files(str(tmp_path / "empty"))
    for i in range(7):
        (tmp_path / f"f{i}").touch()
    with pytest.raises(ConfigError, match=r"there are empty/, f0, f1, f2, f3 and 3 more$"):
        tfrecord.files(str(tmp_path / "missing" / "deeper"))


def test_nothing_is_overwritten_and_nothing_half_is_left(drives, tmp_path):
    path = tmp_path / "a.tfrecord"

    def breaks():
        yield drives[0]
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        features.write(path, breaks())
    with pytest.raises(ConfigError, match=r"record 0: state/tipe is no feature; did you mean \"state/type\"\?$"):
        features.write(path, [drives[0] | {"state/tipe": drives[0]["state/type"]}])
    assert not list(tmp_path.iterdir())
    features.write(path, drives[:1])
    with pytest.raises(ConfigError, match="is there already"):
        features.write(path, drives[:1])


def test_no_link_and_no_file_that_comes_meanwhile_is_overwritten(drives, tmp_path, capsys):
    dangling, late = tmp_path / "dangling", tmp_path / "late"
    dangling.symlink_to(tmp_path / "of an unmounted disk")
    with pytest.raises(ConfigError, match="is there already"):
        features.write(dangling, drives[:1])
    assert main([str(dangling), "--num=1", "--files=1"]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err and dangling.is_symlink()

    def meanwhile():
        yield drives[0]
        late.write_text("a user's")

    with pytest.raises(ConfigError, match="is there already"):
        features.write(late, meanwhile())
    assert late.read_text() == "a user's"
    assert sorted(tmp_path.iterdir()) == [dangling, late]
    with pytest.raises(ConfigError, match=r"^'.*/nowhere/x' cannot be written \(No such file or directory\)$"):
        features.write(tmp_path / "nowhere" / "x", drives[:1])


@pytest.mark.parametrize("pattern", ["", "*"])
def test_a_link_to_nothing_is_no_file_to_leave_out(pattern, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "all")
    (tmp_path / "all" / "z.tfrecord").symlink_to("/nowhere/x")
    with pytest.raises(
        ConfigError, match=r"^env\.path: '.*/z\.tfrecord' is a link to '/nowhere/x', which is not there$"
    ):
        tfrecord.files(str(tmp_path / "all" / pattern))


def test_hidden_files_of_a_folder_are_not_read(drives, tmp_path):
    """What a writer that was killed leaves, and what another system puts beside a file."""
    features.write(tmp_path / "some.tfrecord-00000-of-00001", drives[:2])
    for name in (".some.tfrecord-00000-of-00001-1a2b", "._some.tfrecord-00000-of-00001"):
        (tmp_path / name).write_bytes(b"x")
    assert len(list(features.read(str(tmp_path)))) == 2
    for path in tmp_path.glob("some*"):
        path.unlink()
    with pytest.raises(ConfigError, match=r'has no file with "tfrecord" in its name'):
        tfrecord.files(str(tmp_path))


def test_the_command_writes_files_that_are_read(drives, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(generate, "records", lambda kinds, num, *, seed: iter(drives[:num]))
    arguments = [str(tmp_path / "made"), "--num=3", "--files=2", "--scenarios", "crossing"]
    assert main(arguments) == 0
    assert "3 records in 2 files" in capsys.readouterr().out
    assert [p.name for p in tfrecord.files(str(tmp_path / "made"))] == [
        "driving.tfrecord-00000-of-00002",
        "driving.tfrecord-00001-of-00002",
    ]
    assert len(list(features.read(str(tmp_path / "made")))) == 3
    assert main(arguments) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert main([str(tmp_path / "made" / "deep" / "er"), "--num=1", "--files=1"]) == 0
    assert [p.name for p in (tmp_path / "made" / "deep" / "er").iterdir()] == ["driving.tfrecord-00000-of-00001"]


def test_the_command_makes_no_folder_that_it_cannot_fill(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    assert main([str(tmp_path / "made" / "here")]) == 2
    assert "google_crc32c is not installed; pip install 'rlexp[womd]' brings it" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--seed=99999999999999999999", "99999999999999999999 is not allowed; expected 0 to 4294967295"),
        ("--seed=4294967296", "4294967296 is not allowed; expected 0 to 4294967295"),
        ("--seed=-1", "-1 is not allowed; expected 0 to 4294967295"),
        ("--seed=x", "x is not allowed; expected 0 to 4294967295"),
        ("--num=0", "0 is not allowed; expected 1 to 2147483647"),
        ("--files=1e3", "1e3 is not allowed; expected 1 to 99999"),
        ("--scenarios=strait", "'strait' is not allowed; expected straight, curve, "),
        ("--scenarios=strait", 'did you mean "straight"?'),
    ],
)
def test_numbers_that_the_command_is_not_given(argument, said, drives, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(generate, "records", lambda kinds, num, *, seed: iter(drives * 20))
    with pytest.raises(SystemExit) as refused:
        main([str(tmp_path / "made"), argument])
    told = capsys.readouterr().err
    assert refused.value.code == 2 and said in told and told.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["n" * 300, "deep/" + "n" * 300, "file/made"])
def test_a_folder_that_cannot_be_made_is_told_in_one_line(name, drives, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(generate, "records", lambda kinds, num, *, seed: iter(drives[:num]))
    (tmp_path / "file").touch()
    assert main([str(tmp_path / name), "--num=1", "--files=1"]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("rlexp.envs.womd: ")
        and said.count("\n") == 1
        and f"{tmp_path / name}' cannot be made (" in said
    )
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    with pytest.raises(ConfigError, match=r"^env\.path: '.*' (cannot be looked for|is not there)"):
        tfrecord.files(str(tmp_path / name))


@pytest.mark.parametrize(
    ("error", "code"), [(OverflowError, 1), (KeyboardInterrupt, None), (ConfigError, 2), (OSError, 2)]
)
def test_whatever_stops_the_command_it_leaves_nothing_behind(error, code, drives, tmp_path, monkeypatch):
    def breaks(kinds, num, *, seed):
        yield drives[0]
        raise error("stopped")

    monkeypatch.setattr(generate, "records", breaks)
    arguments = [str(tmp_path / "made" / "here"), "--num=2", "--files=2"]
    if code is not None:
        assert main(arguments) == code
    else:
        with pytest.raises(error, match="stopped"):
            main(arguments)
    assert not list(tmp_path.iterdir())
