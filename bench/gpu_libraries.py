"""How bench/gpu_worker.py calls each library: a class each, which takes a row's tensors and makes the call that is timed.

forward(data), backward(data, d_o, d_state) and decode(data) return a function without arguments; that function returns the
tensors by which results of different libraries are compared. A library that lacks an operation has no such method. State
layout of `data`: [N, Hv, K, V].
"""

import torch


def gradients(make, leaves, d_o, d_state):
    """A call of the backward alone, of a graph of the forward that is kept."""
    o, state = make(*leaves)
    return lambda: torch.autograd.grad((o, state), leaves, (d_o, d_state), retain_graph=True)


def leaves_of(data):
    return [data[name].detach().requires_grad_() for name in ("q", "k", "v", "g", "beta", "state")]


class ChunkFunction:
    """Libraries with chunk_gated_delta_rule(q, k, v, g, beta, initial_state=, output_final_state=, cu_seqlens=)."""

    def __init__(self, chunk):
        self.chunk = chunk

    def call(self, q, k, v, g, beta, state, offsets):
        return self.chunk(q, k, v, g, beta, initial_state=state, output_final_state=True, cu_seqlens=offsets)

    def forward(self, data):
        names = ("q", "k", "v", "g", "beta", "state", "offsets")
        arguments = [data[name] for name in names]

        def run():
            with torch.no_grad():
                return self.call(*arguments)

        return run

    def backward(self, data, d_o, d_state):
        offsets = data["offsets"]
        return gradients(lambda *leaves: self.call(*leaves, offsets), leaves_of(data), d_o, d_state)


class Ours(ChunkFunction):
    def __init__(self):
        import flash_qla

        super().__init__(flash_qla.chunk_gated_delta_rule)
        self.library = flash_qla
        self.version = flash_qla.__version__

    def implementation(self, data, op):
        """Name of what runs the row."""
        operation = {"forward": "chunk_forward", "backward": "chunk_backward", "decode": "recurrent_forward"}[op]
        inputs = [data[name] for name in ("q", "k", "v", "g", "beta")]
        return self.library.explain(*inputs, cu_seqlens=data["offsets"], operation=operation).implementation

    def decode(self, data):
        """In place, through an index, as a server does it."""
        inputs = [data[name] for name in ("q", "k", "v", "g", "beta")]
        rows = torch.arange(data["q"].shape[0], dtype=torch.int32, device=data["q"].device)
        step = self.library.recurrent_gated_delta_rule_pool

        def run():
            with torch.no_grad():
                return [step(*inputs, pool, rows) for pool in data["pools"]][-1:]

        return run


class Fla(ChunkFunction):
    def __init__(self):
        import fla
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

        super().__init__(chunk_gated_delta_rule)
        self.recurrent = fused_recurrent_gated_delta_rule
        self.version = fla.__version__

    def decode(self, data):
        """Into new states: it has no form that works in place."""
        q, k, v, g, beta = (data[name] for name in ("q", "k", "v", "g", "beta"))

        def run():
            with torch.no_grad():
                for pool in data["pools"]:
                    o, _ = self.recurrent(q, k, v, g, beta=beta, initial_state=pool, output_final_state=True)
            return [o]

        return run


class FlashQla(ChunkFunction):
    def __init__(self):
        import flash_qla

        super().__init__(flash_qla.chunk_gated_delta_rule)
        self.version = flash_qla.__version__


class FlashInfer:
    """Packs only; decays, not their logarithms; states [N, Hv, V, K]; no gradients. Its decoding computes the gates too."""

    def __init__(self):
        import flashinfer
        from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose
        from flashinfer.gdn_prefill import chunk_gated_delta_rule

        self.chunk, self.step = chunk_gated_delta_rule, gated_delta_rule_decode_pretranspose
        self.version = flashinfer.__version__

    def forward(self, data):
        q, k, v, g, beta = (data[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta"))
        batch, tokens = data["q"].shape[:2]
        offsets = data["offsets"]
        if offsets is None:
            offsets = torch.arange(batch + 1, dtype=torch.int64, device=q.device) * tokens
        state = data["state"].transpose(-1, -2).contiguous()
        last, decay = torch.empty_like(state), g.exp()

        def run():
            with torch.no_grad():
                return self.chunk(
                    q,
                    k,
                    v,
                    decay,
                    beta,
                    initial_state=state,
                    output_final_state=True,
                    cu_seqlens=offsets,
                    output_state=last,
                )

        return run

    def decode(self, data):
        q, k, v = (data[name] for name in ("q", "k", "v"))
        a_log = torch.zeros(v.shape[2], dtype=torch.float32, device=q.device)
        bias = torch.zeros_like(a_log)
        raw = data["beta"].to(q.dtype)

        def run():
            with torch.no_grad():
                for pool in data["pools"]:
                    self.step(q, k, v, pool, a_log, raw, bias, raw, use_qk_l2norm=False)
            return []  # its gates are not the others': nothing to compare

        return run


LIBRARIES = {"ours": Ours, "fla": Fla, "flash-qla": FlashQla, "flashinfer": FlashInfer}
