"""What a cached sample may hold, that it comes back as it was, and that nothing else is taken for it."""

import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch

from xlatrainer.data import sample_files
from xlatrainer.data.sample_files import DamagedSample, decode_sample, encode_sample


def there_and_back(sample: Any, compress: bool = True) -> Any:
    return decode_sample(encode_sample(sample, 3, compress, "sample 3"), 3)


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize(
    "sample",
    [None, 7, "text", b"\x00\xff", True, 1.5, float("inf"), (1, [2.5, {"a": "b", 3: None}]), {1, 2}, [], {}, 2**80],
    ids=repr,
)
def test_plain_samples(sample: Any, compress: bool) -> None:
    found = there_and_back(sample, compress)
    assert found == sample
    assert type(found) is type(sample)


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.bool,
        torch.uint8,
        torch.int64,
        torch.uint16,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
    ],
    ids=str,
)
def test_tensors(dtype: torch.dtype, compress: bool) -> None:
    for shape in [(), (0, 3), (4, 5)]:
        tensor = torch.randint(0, 2, shape).to(dtype)
        found = there_and_back(tensor, compress)
        assert (found.dtype, found.shape) == (dtype, tensor.shape)
        assert torch.equal(found.to(torch.complex128), tensor.to(torch.complex128))


def test_arrays_and_numbers_of_numpy() -> None:
    found = there_and_back({"a": np.arange(6, dtype=np.uint32).reshape(2, 3), "n": np.float32(0.5), "z": np.array(3)})
    assert (found["a"].dtype, found["a"].tolist()) == (np.uint32, [[0, 1, 2], [3, 4, 5]])
    assert type(found["n"]) is np.float32
    assert found["z"].shape == ()


def test_views_and_shared_memory() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    sample = {
        "whole": whole,
        "row": whole[1],
        "column": whole[:, 1],
        "again": whole,
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "gradient": torch.ones(2, requires_grad=True),
        "on the device": torch.ones(1, device="xla"),
    }
    found = there_and_back(sample)
    for name, tensor in sample.items():
        assert torch.equal(found[name], tensor.detach().cpu().resolve_conj()), name
        assert not found[name].requires_grad
        assert found[name].device.type == "cpu"
    assert len(encode_sample(whole[:, 1], 0, False, "")) < len(encode_sample(torch.ones(30), 0, False, ""))
    found["row"].fill_(-1)  # what is read belongs to the reader
    assert found["whole"][1].tolist() == [4.0, 5.0, 6.0, 7.0]


class Own:
    pass


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ((torch.ones(1), Own()), r"sample 3\[1\] is a Own, which cannot be saved: loading it would execute code"),
        (torch.eye(2).to_sparse(), "sample 3 is a sparse or quantized tensor"),
        (np.array(["text"]), "sample 3 is a ndarray"),
    ],
)
def test_what_is_refused(sample: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        encode_sample(sample, 3, True, "sample 3")


def test_it_really_compresses_what_can_be() -> None:
    zeros, noise = torch.zeros(10_000), torch.randint(0, 256, (40_000,), dtype=torch.uint8)
    assert len(encode_sample(zeros, 0, True, "")) < 0.01 * len(encode_sample(zeros, 0, False, ""))
    assert encode_sample(noise, 0, True, "") == encode_sample(noise, 0, False, "")


CONTENT = encode_sample((torch.arange(40), {"label": 3, "name": "first"}), 3, True, "sample 3")
PLAIN = encode_sample((torch.arange(40), {"label": 3, "name": "first"}), 3, False, "sample 3")


@pytest.mark.parametrize("content", [CONTENT, PLAIN])
def test_every_truncation_is_found(content: bytes) -> None:
    for length in range(len(content)):
        with pytest.raises(DamagedSample):
            decode_sample(content[:length], 3)
    with pytest.raises(DamagedSample, match="bytes after its header, which says"):
        decode_sample(content + b"\0", 3)


@pytest.mark.parametrize("content", [CONTENT, PLAIN])
def test_every_flipped_byte_is_found(content: bytes) -> None:
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 0x41
        with pytest.raises(DamagedSample):
            decode_sample(bytes(changed), 3)


def signed(body: bytes, packed: bool = False, size: int | None = None, number: int = 3) -> bytes:
    """A file with a right checksum, whatever is in it."""
    fields = (number, len(body), len(body) if size is None else size)
    checksum = sample_files._checksum(packed, fields, body)
    return sample_files._HEADER.pack(b"xlasampl", 1, packed, 0, checksum, *fields) + body


BODY = zlib.decompress(CONTENT[40:])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has 0 bytes, fewer than a header"),
        (b"PK" + CONTENT[2:], "it is no file of a cached sample"),
        (CONTENT[:8] + b"\x02" + CONTENT[9:], "its version is 2; this program reads version 1"),
        (encode_sample(1, 4, True, ""), "it is the file of sample 4"),
        (signed(b"none", packed=True), "it cannot be unpacked"),
        (signed(zlib.compress(BODY), True, len(BODY) - 1), "it unpacks to another size than the"),
        (signed(zlib.compress(BODY), True, len(BODY) + 1), "it unpacks to another size than the"),
        (signed(zlib.compress(BODY), True, 2**50), "bytes unpack to 1125899906842624"),
        (signed(b"\xff" * 100), "its contents make no sense, though their checksum is right"),
        (signed(struct.pack("<Q", 2**60) + BODY[8:]), "its contents make no sense"),
        (signed(BODY.replace(b"tensor", b"banana")), "unknown type 'banana'"),
        (signed(BODY.replace(b'\\"value\\": 0', b'\\"value\\": 9')), "its contents make no sense"),
    ],
)
def test_what_is_wrong_is_said(content: bytes, message: str) -> None:
    with pytest.raises(DamagedSample, match=message):
        decode_sample(content, 3)
    assert decode_sample(signed(BODY), 3)[1] == {"label": 3, "name": "first"}
