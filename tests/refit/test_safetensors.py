"""The reader of safetensors: what it reads, and that nothing broken passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tccompile.errors import UsageError
from tccompile.refit.safetensors import SafeTensors
from tests.refit.common import write_safetensors

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array([1.5, -2], np.float16),
    "none": np.zeros((0, 4), np.int32),
    "one": np.float32(3).reshape(()),
}


def test_arrays_are_read(tmp_path: Path) -> None:
    found = SafeTensors(write_safetensors(tmp_path / "a.safetensors", ARRAYS))
    assert set(found) == set(ARRAYS) and len(found) == 4
    for name, values in ARRAYS.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)
    with pytest.raises(KeyError):
        found["c"]


def test_bfloat16_is_widened(tmp_path: Path) -> None:
    bits = np.array([0x3FC0, 0xC000, 0x7F80], np.uint16)
    file = write_safetensors(tmp_path / "a.safetensors", {"w": bits}, {"w": "BF16"})
    np.testing.assert_array_equal(SafeTensors(file)["w"], np.array([1.5, -2, np.inf], np.float32))


def test_metadata_and_spaces_behind_the_header_are_no_arrays(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    said = {"__metadata__": {"format": "pt"}, "w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}
    text = json.dumps(said).encode() + b"   "
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\1\2")
    found = SafeTensors(path)
    assert list(found) == ["w"] and found["w"].tolist() == [1, 2]


def raw(tmp_path: Path, header: Any, data: bytes = b"\0" * 8) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "broken.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def told(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    "header, why",
    [
        (b"{]", "its header is no JSON"),
        (b"[" * 100_000, "its header is no JSON"),
        (b'{"a": 1, "a": 1}', "a name is in it twice"),
        (b"\xff\xfe", "its header is no JSON"),
        ([], "no JSON object"),
        ({"w": 3}, "'w' has not a dtype, a shape and data_offsets"),
        (told() | {"w": told()["w"] | {"more": 1}}, "'w' has not a dtype, a shape and data_offsets"),
        (told("F8_E4M3"), "'w' is of 'F8_E4M3'; .* convert it"),
        (told(["F32"]), r"'w' is of \['F32'\]"),
        (told(shape=[-2]), r"'w' has the shape \[-2\]"),
        (told(shape=[2.0]), r"'w' has the shape \[2.0\]"),
        (told(shape=[True, 2]), r"'w' has the shape \[True, 2\]"),
        (told(shape=[1] * 33 + [2]), r"'w' has the shape"),
        (told(shape=[3]), "'w' needs 12 bytes, and is to lie from 0 to 8"),
        (told(offsets=[0, 8, 8]), "the data_offsets"),
        (told(offsets=[8, 0]), "'w' needs 8 bytes"),
        (told(offsets=[4, 12]), "'w' needs 8 bytes, and is to lie from 4 to 12"),
        (told(shape=[1], offsets=[0, 4]), "its arrays end at byte"),
        (told(shape=[1], offsets=[4, 8]), "'w' begins at byte 4 of the data, those before it end at 0"),
        (told() | {"v": told()["w"]}, "begins at byte 0 of the data, those before it end at 8"),
        (told(shape=[1 << 40, 1 << 40]), "bytes, and is to lie"),
    ],
)
def test_what_is_broken_is_refused(tmp_path: Path, header: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        SafeTensors(raw(tmp_path, header))


@pytest.mark.parametrize("data", [b"", b"\1\2\3", (1 << 40).to_bytes(8, "little") + b"{}", (3).to_bytes(8, "little") + b"{}"])
def test_a_length_that_the_file_does_not_have(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=f"a header of .* in a file of {len(data)}"):
        SafeTensors(path)


def test_a_file_that_is_not_there_or_gets_shorter(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none.safetensors: cannot be read"):
        SafeTensors(tmp_path / "none.safetensors")
    path = write_safetensors(tmp_path / "a.safetensors", ARRAYS)
    found = SafeTensors(path)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 4)
    with pytest.raises(UsageError, match="'one' cannot be read: the file ends at"):
        found["one"]


@given(st.data())
def test_changed_bytes_are_refused_or_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = write_safetensors(tmp_path_factory.getbasetemp() / "fuzz.safetensors", ARRAYS)
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    try:
        found = SafeTensors(path)
    except UsageError:
        return
    for name in found:
        assert found[name].nbytes <= 2 * len(whole)
