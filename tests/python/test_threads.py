"""Results do not depend on threads; calls from several threads, after fork, and in another process agree bit for bit (B11)."""

import hashlib
import os
import resource
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import implementations
from problems import TENSORS, Problem, make, with_gradients

import flash_qla
from flash_qla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

BIG = Problem(lengths=(200, 0, 64, 1, 130), heads_qk=2, heads_v=4, dim_k=64, dim_v=64, gate="computed", beta="sigmoid")
PLAIN = replace(BIG, gate="log", beta="given", l2norm=False)


def chunks(arguments):
    a = with_gradients(arguments)
    o, state = chunk_gated_delta_rule(**a, output_final_state=True)
    (o.square().sum() + state.sum()).backward()
    return [o.detach(), state.detach(), *(a[name].grad for name in TENSORS)]


def tokens(arguments):
    return fused_recurrent_gated_delta_rule(**arguments, output_final_state=True)


@pytest.fixture
def threads():
    yield torch.set_num_threads
    torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_B11_one_and_many_threads(threads, dtype, force):
    a = make(replace(BIG, dtype=dtype))
    for run, operation in ((chunks, "chunk_backward"), (tokens, "recurrent_forward")):
        for implementation in implementations(operation):
            force(implementation)
            results = []
            for count in (1, 2, 3, 7, 1):
                threads(count)
                results.append(run(a))
            for other in results[1:]:
                assert all(map(torch.equal, results[0], other)), implementation


def test_calls_from_several_threads(threads):
    threads(2)
    inputs = [make(Problem(tokens=130, dim_k=64, dim_v=64, seed=seed)) for seed in range(8)]
    alone = [chunk_gated_delta_rule(**a)[0] for a in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            together = list(pool.map(lambda a: chunk_gated_delta_rule(**a)[0], inputs))
            assert all(map(torch.equal, alone, together))


def test_calls_lose_no_memory():
    """Neither calls that succeed nor calls that fail; judged by the least growth of several rounds."""
    a = make(Problem(tokens=2))

    def fails():
        with pytest.raises(ValueError):
            chunk_gated_delta_rule(**{**a, "beta": a["beta"][:, 1:]})

    def kilobytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * (resource.getpagesize() // 1024)

    for call in (lambda: tokens(a), lambda: chunk_gated_delta_rule(**a), fails):
        growth = []
        for _ in range(4):
            before = kilobytes()
            for _ in range(3000):
                call()
            growth.append(kilobytes() - before)
        assert min(growth[1:]) < 100, growth  # 30 bytes a call would be 90


def test_calls_let_other_python_threads_run():
    """The interpreter is free while an op computes."""
    import threading
    import time

    a = make(Problem(tokens=4000, heads_v=4, dim_k=64, dim_v=64))
    done = threading.Event()
    ticks = []

    def work():
        for _ in range(5):
            chunk_gated_delta_rule(**a)
        done.set()

    worker = threading.Thread(target=work)
    worker.start()
    while not done.is_set():
        ticks.append(time.perf_counter())
        time.sleep(0.0005)
    worker.join()
    assert len(ticks) > 5


def digest(a) -> str:
    """Of results of every op, without any of torch's own ops that would run in its pool: that pool does not survive a fork."""
    inputs = [a[name] for name in ("q", "k", "v", "g", "beta")]
    g, A, o, _, state, _ = flash_qla.chunk_gated_delta_rule_fwd(*inputs, cu_seqlens=a["cu_seqlens"])
    gradients = flash_qla.chunk_gated_delta_rule_bwd(*inputs[:3], g, inputs[4], A, o, cu_seqlens=a["cu_seqlens"])
    results = [o, state, *gradients[:5], *tokens(a)]
    return hashlib.sha256(b"".join(x.numpy().tobytes() for x in results)).hexdigest()


SCRIPT = """
    import os, sys, torch
    sys.path.insert(0, FOLDER)
    from test_threads import PLAIN, digest, make
    torch.set_num_threads(2)
    torch.randn(1000, 1000) @ torch.randn(1000, 1000)
    a = make(PLAIN)
    first = digest(a)
    for _ in range(2):  # both torch's pool and ours have run
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, digest(a).encode())
            os._exit(0)
        os.close(writer)
        told = os.read(reader, 100).decode()
        assert os.waitpid(child, 0)[1] == 0 and told == first, (told, first)
    assert digest(a) == first
    print(first)
"""


def test_B11_after_fork_and_in_another_process():
    code = textwrap.dedent(SCRIPT).replace("FOLDER", repr(str(Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": str(Path(flash_qla.__file__).parents[1]), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == digest(make(PLAIN))


def test_data_loader_workers():
    data = torch.utils.data.DataLoader(Rows(), batch_size=None, num_workers=1)
    expected = [Rows()[i] for i in range(2)]
    assert all(map(torch.equal, data, expected))


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        if i >= len(self):
            raise IndexError
        return chunk_gated_delta_rule(**make(Problem(seed=i)))[0]
