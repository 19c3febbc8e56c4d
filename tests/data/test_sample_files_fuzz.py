"""Damaged files of cached samples, made at random: never taken for the sample, never more memory than the file says."""

import random
import tracemalloc
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xlatrainer.data.sample_files import DamagedSample, decode_sample, encode_sample

NUMBER = 5
SAMPLES: list[Any] = [
    {"image": torch.arange(3000, dtype=torch.uint8).reshape(3, 20, 50), "label": 3},
    (torch.zeros(5000), "text", [1.5, None, b"bytes"]),
    torch.randn(4, 5, generator=torch.Generator().manual_seed(0)),
    "a plain string",
]
FILES = [encode_sample(sample, NUMBER, compress, "") for sample in SAMPLES for compress in (True, False)]
ROUNDS = 10_000


def is_refused(content: bytes) -> bool:
    try:
        decode_sample(content, NUMBER)
    except DamagedSample:
        return True
    return False


plain_data = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(max_examples=60, deadline=None)
@given(plain_data, st.booleans())
def test_what_is_written_is_read(sample: Any, compress: bool) -> None:
    assert decode_sample(encode_sample(sample, NUMBER, compress, ""), NUMBER) == sample


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FILES), st.data())
def test_changed_bytes_are_found(content: bytes, data: st.DataObject) -> None:
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    assert bytes(changed) == content or is_refused(bytes(changed))


@settings(max_examples=100, deadline=None)
@given(
    st.binary(max_size=200) | st.sampled_from(FILES).flatmap(lambda f: st.integers(0, len(f) - 1).map(lambda n: f[:n]))
)
def test_other_bytes_are_refused(content: bytes) -> None:
    assert is_refused(content)


def damaged(content: bytes, draw: random.Random) -> bytes:
    """A byte or some flipped, a part cut off, left out, doubled or exchanged for another file's."""
    place, length = draw.randrange(len(content)), draw.randrange(1, 64)
    kind = draw.randrange(6)
    if kind <= 1:
        changed = bytearray(content)
        for _ in range(1 if kind == 0 else length):
            changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        return bytes(changed)
    if kind == 2:
        return content[:place]
    if kind == 3:
        return content[:place] + content[place + length :]
    if kind == 4:
        return content[:place] + content[place : place + length] + content[place:]
    other = draw.choice(FILES)
    return content[:place] + other[place : place + length] + content[place + length :]


def test_ten_thousand_damaged_files() -> None:
    draw = random.Random(0)
    most = 2 * max(map(len, FILES)) + max(len(encode_sample(sample, 0, False, "")) for sample in SAMPLES) + 500_000
    tracemalloc.start()
    try:
        for _ in range(ROUNDS):
            content = draw.choice(FILES)
            changed = damaged(content, draw)
            assert changed == content or is_refused(changed)
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()
