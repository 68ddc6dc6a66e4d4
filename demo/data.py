"""Text for the demo: a file, or the sources of the Python standard library, as bytes; a training part and a held-out part."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

# Folders of the standard library that are not ordinary code: tests, generated tables, packages installed inside.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
HELD_OUT_EVERY = 20  # one file of so many, or the last such part of a single file
MIN_BYTES = 100_000


@dataclass
class Text:
    """Bytes as uint8 tensors, and where they come from, in words."""

    train: torch.Tensor
    held_out: torch.Tensor
    source: str

    def to(self, device):
        return Text(self.train.to(device), self.held_out.to(device), self.source)


def _tensor(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def load_text(path=None):
    """The text of `path`, or of the standard library. Always the same bytes in the same order on the same machine."""
    if path:
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise SystemExit(f"TEXT={path} cannot be read: {error.strerror}") from None
        if len(data) < MIN_BYTES:
            raise SystemExit(f"TEXT={path} has {len(data):,} bytes; the demo needs at least {MIN_BYTES:,} to learn anything from")
        cut = len(data) - len(data) // HELD_OUT_EVERY
        return Text(_tensor(data[:cut]), _tensor(data[cut:]), f"{path}, the last {100 // HELD_OUT_EVERY} % held out")
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py"))
    names = [name for name in names if not SKIPPED_FOLDERS.intersection(Path(name).parts)]
    held_out = names[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
    chosen = set(held_out)
    train = b"".join((root / name).read_bytes() for name in names if name not in chosen)
    rest = b"".join((root / name).read_bytes() for name in held_out)
    if len(train) < MIN_BYTES or len(rest) < MIN_BYTES // HELD_OUT_EVERY:
        raise SystemExit(f"no Python sources found under {root}; give a text file with TEXT=path")
    source = f"the {len(names)} source files of Python's standard library, {len(held_out)} of them held out"
    return Text(_tensor(train), _tensor(rest), source)


def random_windows(data, count, length, generator):
    """[count, length + 1] int64: windows at random places. Position t's target is the byte at t + 1."""
    starts = torch.randint(0, data.numel() - length, (count,), generator=generator)
    return torch.stack([data[s : s + length + 1] for s in starts.tolist()]).long()


def even_windows(data, count, length):
    """[at most count, length + 1] int64: windows spread evenly over the text, without overlap."""
    available = (data.numel() - 1) // length
    if available < 1:
        raise SystemExit(f"the held-out text has {data.numel()} bytes, less than one window of {length}")
    count = min(count, available)
    starts = [i * available // count * length for i in range(count)]
    return torch.stack([data[s : s + length + 1] for s in starts]).long()


def from_line_start(data, start, length):
    """`length` bytes from the first line that begins after `start`, or from `start` if none is near."""
    line_ends = (data[start : start + length] == ord("\n")).nonzero()
    begin = start + int(line_ends[0]) + 1 if len(line_ends) else start
    return data[begin : begin + length]


def readable(data):
    """Bytes (any iterable of ints) as text that a terminal shows safely."""
    text = bytes(data).decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "    " if c == "\t" else "?" for c in text)
