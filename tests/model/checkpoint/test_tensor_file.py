"""One safetensors file: dtypes, laziness, and files that are not whole."""

import errno
import json

import ml_dtypes
import numpy as np
import pytest
import safetensors

from widemesh.model.checkpoint.tensor_file import DTYPES, NAMES, TensorFile, TensorFileError, write_tensor_file


def test_every_dtype_goes_out_and_comes_back_as_bytes(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {}
    for name, dtype in DTYPES.items():
        data = rng.integers(0, 2 if dtype == np.bool_ else 256, size=6 * dtype.itemsize, dtype=np.uint8)
        tensors[name] = data.view(dtype).reshape(2, 3)
    tensors["empty"] = np.zeros((0, 4), np.float32)
    tensors["scalar"] = np.array(3, np.float32)
    write_tensor_file(tmp_path / "t.safetensors", tensors)
    file = TensorFile.open(tmp_path / "t.safetensors")
    assert set(file.entries) == set(tensors)
    for name, want in tensors.items():
        got = file.tensor(name)
        assert got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()
        assert file.entries[name].dtype == NAMES[want.dtype]
        assert not got.flags.writeable


def test_e8m0_bytes_are_not_converted(tmp_path):
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)
    write_tensor_file(tmp_path / "t.safetensors", {"s": scales})
    assert np.array_equal(TensorFile.open(tmp_path / "t.safetensors").tensor("s").view(np.uint8), np.arange(256))


def test_tensors_are_views_of_the_file(golden_b):
    file = TensorFile.open(golden_b / "model.safetensors")
    assert np.shares_memory(file.tensor("embed.weight"), file.data)


def _header(value: object) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x02",
        (1 << 62).to_bytes(8, "little"),
        (100).to_bytes(8, "little") + b"{}",
        _header(b"\xff\xfe not json"),
        _header([1, 2]),
        _header({"a": 3}),
        _header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}) + b"1234",
        _header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}) + b"1234567890",
        _header({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}) + b"12345678",
        _header({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}) + b"12345678",
        _header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}) + b"12345678",
        _header({"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}) + b"12345678",
        _header({"a": {"dtype": "F32", "shape": [2]}}) + b"12345678",
    ],
)
def test_damaged_files_give_one_sentence(tmp_path, content):
    (tmp_path / "t.safetensors").write_bytes(content)
    with pytest.raises(TensorFileError, match=r"^t.safetensors is truncated, damaged or no safetensors file \("):
        TensorFile.open(tmp_path / "t.safetensors")


def test_every_truncation_of_a_file_is_noticed(tmp_path):
    write_tensor_file(tmp_path / "whole", {"a": np.arange(4, dtype=np.float32), "b": np.zeros(3, np.int8)})
    whole = (tmp_path / "whole").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(TensorFileError, match=r"^cut is truncated"):
            TensorFile.open(tmp_path / "cut")


def test_a_missing_file_and_a_folder_in_its_place(tmp_path):
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(TensorFileError, match="does not exist"):
            TensorFile.open(path)


def test_a_write_that_fails_names_the_file(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise safetensors.SafetensorError("No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    path = tmp_path / "t.safetensors"
    with pytest.raises(OSError, match="No space left on device") as raised:
        write_tensor_file(path, {})
    assert raised.value.errno == errno.EIO and raised.value.filename == str(path)
