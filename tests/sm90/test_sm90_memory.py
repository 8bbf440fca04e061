"""Determinism, uninitialised memory, streams, CUDA graphs, devices out of memory."""

import pytest
import torch
from helpers import DIMS, bits_equal, inputs, kernel, make_call

import dm_plugin

NAMES = ("o", "dq", "dk", "dv")


def poison(byte: int, gib: float = 2.0) -> None:
    """Leave `gib` GiB of one byte in the caching allocator's free blocks, large and small (0xFF is NaN in every format here)."""
    torch.cuda.empty_cache()
    blocks = [torch.full((int(gib * 2**30) // 8,), byte, dtype=torch.uint8, device="cuda") for _ in range(8)]
    blocks += [
        torch.full((n,), byte, dtype=torch.uint8, device="cuda") for n in (512, 4096, 65536, 524288) for _ in range(64)
    ]
    torch.cuda.synchronize()
    del blocks


def gradients(q, k, v, do, **kw):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = dm_plugin.dm_attn_func(*leaves, **kw)
    return o.detach(), *torch.autograd.grad(o, leaves, do)


@pytest.mark.parametrize("t", [1, 96, 97, 257, 1000])
@pytest.mark.parametrize("d", DIMS)
def test_old_memory_never_shows(d, t):
    """Outputs, workspace and padding full of NaN beforehand change no bit (A21, pitfall 9)."""
    q, k, v, do = inputs(t=t, h=4, g=2, d=d, seed=t)
    results = []
    for byte in (0x00, 0xFF):
        poison(byte, 0.5)
        results.append(kernel(q, k, v, do, make_call(d, 0), probe=True))
    for name in NAMES:
        assert torch.isfinite(getattr(results[1], name)).all(), name
        assert bits_equal(getattr(results[0], name), getattr(results[1], name)), name
    for name in ("delta", "delta_stale", "rows", "columns"):
        assert bits_equal(getattr(results[0].back, name), getattr(results[1].back, name)), name


@pytest.mark.parametrize("d", DIMS)
def test_twenty_runs_on_a_busy_gpu_are_one(d):
    """Bitwise equal 20 times while another stream keeps the GPU full (guards pitfall 3 and 9)."""
    q, k, v, do = inputs(t=1500, h=8, g=2, d=d, seed=12)
    first = kernel(q, k, v, do, make_call(d, 0))
    noise, a = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(20):
        with torch.cuda.stream(noise):
            for _ in range(3):
                a = (a @ a).clamp(-1, 1)
        again = kernel(q, k, v, do, make_call(d, 0))
        for name in NAMES:
            assert bits_equal(getattr(first, name), getattr(again, name)), name


def test_side_stream_with_a_slow_producer():
    """The kernels wait for their own stream's producer and for nothing else."""
    q, k, v, do = inputs(t=512, h=4, d=128, seed=13)
    want = gradients(q, k, v, do)
    side = torch.cuda.Stream()
    late = [torch.zeros_like(x) for x in (q, k, v, do)]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        for x, y in zip(late, (q, k, v, do), strict=True):
            x.copy_(y)
        got = gradients(*late)
    side.synchronize()
    assert all(bits_equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("d", DIMS)
def test_graph_capture_and_replay(d):
    """Captured once, replayed with new inputs: equal to eager to the bit each time, probe buffers included (A22)."""
    static = [x.clone() for x in inputs(t=300, h=4, g=2, d=d, seed=14)]
    call = make_call(d, 0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kernel(*static, call, probe=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = kernel(*static, call, probe=True)
    for seed in (15, 16, 17):
        fresh = inputs(t=300, h=4, g=2, d=d, seed=seed)
        for x, y in zip(static, fresh, strict=True):
            x.copy_(y * 2)
        graph.replay()
        want = kernel(*[y * 2 for y in fresh], call, probe=True)
        for name in NAMES:
            assert bits_equal(getattr(held, name), getattr(want, name)), name
        assert bits_equal(held.back.rows, want.back.rows)
        assert torch.equal(held.out.stats, want.out.stats)
        assert torch.equal(held.back.stats, want.back.stats)


def test_out_of_memory_leaves_the_process_usable():
    q, k, v, do = inputs(t=4096, h=16, d=128, seed=18)
    want = gradients(q, k, v, do)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - (60 << 20), dtype=torch.uint8, device="cuda")
    with pytest.raises(RuntimeError, match="out of memory"):
        gradients(q, k, v, do)
    del hog
    torch.cuda.empty_cache()
    assert all(bits_equal(a, b) for a, b in zip(gradients(q, k, v, do), want, strict=True))


def test_memory_is_linear_in_tokens():
    """Peak memory of forward and backward grows with T, not with T squared."""
    peak = {}
    for t in (8192, 32768):
        q, k, v, do = inputs(t=t, h=2, d=128)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients(q, k, v, do)
        peak[t] = torch.cuda.max_memory_allocated() - before
    assert peak[32768] < 4.6 * peak[8192], peak
