"""Rows of the GPU benchmark: what a line of gpu_cases.txt says, its name, its bytes. Needs no torch."""

from dataclasses import asdict, dataclass

DIM = 128
STATE_BYTES = DIM * DIM * 4
POOL_BYTES = 1 << 30  # states of a decoding row, all layers: several times a second-level cache
TINY = 512  # by which lengths are divided where only the driver is tried


@dataclass(frozen=True)
class Case:
    op: str  # forward, backward, decode
    heads_qk: int
    heads_v: int
    lengths: tuple  # of every sequence
    packed: bool = False
    undecayed: float = 0.25  # share of the heads
    peers: bool = False

    @property
    def heads(self):
        return f"({self.heads_qk},{self.heads_v})"

    @property
    def name(self):
        if self.op == "decode":
            return f"decode {self.heads} B={len(self.lengths)}"
        runs = []
        for length in self.lengths:
            if runs and runs[-1][1] == length:
                runs[-1][0] += 1
            else:
                runs.append([1, length])
        several = [f"{count}x{length}" if count > 1 or not self.packed else str(length) for count, length in runs]
        words = " + ".join(several) + (" packed" if self.packed and len(runs) == 1 else "")
        return f"{self.op} {self.heads} {words}" + (", every head decaying" if self.undecayed == 0 else "")

    @property
    def tokens(self):
        return sum(self.lengths)

    @property
    def layers(self):
        """Calls in a graph, each with states of its own: 1 but for decoding."""
        return max(1, min(64, POOL_BYTES // self.state_bytes)) if self.op == "decode" else 1

    @property
    def state_bytes(self):
        """Of one state a sequence and head."""
        return len(self.lengths) * self.heads_v * STATE_BYTES

    @property
    def least_bytes(self):
        """Each input read once and each output written once, in a call."""
        rows = self.tokens * (2 * self.heads_qk + 2 * self.heads_v) * DIM * 2
        gates = self.tokens * self.heads_v * 8
        if self.op == "backward":  # q, k, v, do; dq, dk, dv; gates and their gradients; initial state, dht, dh0
            return rows + self.tokens * (2 * self.heads_qk + self.heads_v) * DIM * 2 + 2 * gates + 3 * self.state_bytes
        return rows + gates + 2 * self.state_bytes

    def tiny(self):
        """The same row, small enough for a processor."""
        lengths = self.lengths[:3] if self.op == "decode" else tuple(max(1, length // TINY) for length in self.lengths[:4])
        return Case(**{**asdict(self), "lengths": lengths, "heads_qk": 1, "heads_v": self.heads_v // self.heads_qk})


def parse_lengths(text):
    """(lengths, packed) of 4x8192 (a batch) or 4096+28672, 32768+31x512 (packs)."""
    terms = [term.split("x") if "x" in term else ("1", term) for term in text.split("+")]
    lengths = tuple(int(length) for count, length in terms for _ in range(int(count)))
    return lengths, "+" in text


def parse_case(line):
    words = dict(word.split("=", 1) for word in line.split("#")[0].split())
    if not words:
        return None
    op, heads = words.pop("op"), words.pop("heads")
    if op == "decode":
        lengths, packed = (1,) * int(words.pop("requests")), False
    else:
        lengths, packed = parse_lengths(words.pop("lengths"))
    heads_qk, heads_v = map(int, heads.split(","))
    undecayed, peers = float(words.pop("undecayed", 0.25)), words.pop("peers", "no") == "yes"
    if words or op not in ("forward", "backward", "decode"):
        raise ValueError(f"not a row: {line.strip()}")
    return Case(op, heads_qk, heads_v, lengths, packed, undecayed, peers)


def read_cases(text):
    return [case for line in text.splitlines() if (case := parse_case(line))]
