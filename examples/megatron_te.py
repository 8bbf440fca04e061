"""Train a small GPT or hybrid model on a Hopper GPU with real Megatron-Core and Transformer Engine, under one kind of attention.

    python examples/megatron_te.py --arm dm_matched --model gpt --out runs/te/gpt/dm_matched --steps 200
    dm-plugin ab examples/ab/te_gpt.yaml          all arms, then the table and the page

--arm te_bf16           Transformer Engine's BF16 attention (cuDNN), BF16 linear layers
      te_fp8_linears    the same attention, FP8 linear layers (DelayedScaling)
      te_fp8            Transformer Engine's FP8 attention (DelayedScaling with fp8_dpa) and FP8 linear layers
      dm_stale | dm_consistent | dm_matched     our kernel through Transformer Engine's plugin hook, FP8 linear layers; --linears bf16 changes that
--model gpt             4 layers, 1024 wide, head_dim 128, 8 query heads over 2, QK norm, RoPE, SwiGLU
        hybrid          Megatron's HybridModel, pattern *-*-*-*- (its spec names Transformer Engine's attention class itself)

Writes <out>/train.jsonl, <out>/dumps/, <out>/checkpoint.pt as megatron_tiny.py does; same initialisation, data and random state in every
arm. --resume goes on; with another --arm it swaps the attention in the middle of a run. Data: the bytes of a text, as in megatron_tiny.py.
"""

import argparse
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from megatron_tiny import alone, batch, corpus, learning_rate, load, save, trim

ARMS = ("te_bf16", "te_fp8_linears", "te_fp8", "dm_stale", "dm_consistent", "dm_matched")
SAME = ("model", "seed", "tokens", "batch", "layers", "lr", "warmup")  # what a resumed run may not change


def build(args: argparse.Namespace) -> Any:
    """The model in BF16 with FP32 master weights kept by the optimizer below."""
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    fp8: dict[str, Any] = {}
    linears = "bf16" if args.arm == "te_bf16" else args.linears
    if linears == "fp8":
        fp8 = {
            "fp8": "hybrid",
            "fp8_recipe": "delayed",
            "fp8_amax_history_len": 1,
            "fp8_amax_compute_algo": "most_recent",
        }
        fp8["fp8_dot_product_attention"] = args.arm == "te_fp8"
    elif args.arm == "te_fp8":
        raise SystemExit(
            "--arm te_fp8 --linears bf16: Transformer Engine's autocast puts linear layers and attention in FP8 together"
        )
    recompute: dict[str, Any] = {
        "none": {},
        "core_attn": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }[args.recompute]
    config = TransformerConfig(
        num_layers=args.layers * (2 if args.model == "hybrid" else 1),
        hidden_size=args.width,
        num_attention_heads=args.width // 128,
        num_query_groups=max(1, args.width // 512),
        kv_channels=128,
        ffn_hidden_size=args.width * 11 // 4,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        deterministic_mode=deterministic(args),
        attention_backend=AttnBackend.flash if args.arm.startswith("dm_") else AttnBackend.fused,
        **fp8,
        **recompute,
    )
    shared: dict[str, Any] = {"vocab_size": 256, "max_sequence_length": args.tokens, "position_embedding_type": "rope"}
    if args.model == "gpt":
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
        from megatron.core.models.gpt.gpt_model import GPTModel

        return GPTModel(config, get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True), **shared).cuda()
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    return HybridModel(config, hybrid_stack_spec, hybrid_layer_pattern="*-" * args.layers, **shared).cuda()


def deterministic(args: argparse.Namespace) -> bool:
    """Our arms, unless told otherwise: cuDNN's FP8 attention has no deterministic backward."""
    return args.arm.startswith("dm_") and not args.nondeterministic


@contextmanager
def job(args: argparse.Namespace) -> Iterator[None]:
    """torch.distributed, Megatron's parallel state; for our arms the plugin and deterministic kernels."""
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0" if deterministic(args) else "1"
    os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"  # the checkpoint that --resume reads is this script's own
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch.distributed as dist
    import transformer_engine.pytorch  # noqa: F401
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if args.arm.startswith("dm_"):
        from dm_plugin.integrations.transformer_engine import install

        install(mode=args.arm.removeprefix("dm_"))
    if deterministic(args):
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.manual_seed(args.seed)
    model_parallel_cuda_manual_seed(args.seed)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Masters:
    """AdamW on FP32 copies of BF16 parameters, one fused step; state_dict covers both."""

    def __init__(self, model: Any, lr: float) -> None:
        self.params = list(model.parameters())
        self.masters = [p.detach().float().requires_grad_() for p in self.params]
        self.adam = torch.optim.AdamW(self.masters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.adam.param_groups  # load_state_dict puts new ones in their place

    def step(self) -> torch.Tensor:
        """One update from the BF16 gradients, clipped to norm 1; returns the norm before clipping."""
        for p, m in zip(self.params, self.masters, strict=True):
            m.grad = torch.zeros_like(m) if p.grad is None else p.grad.float()
        norm = torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.adam.step()
        with torch.no_grad():
            for p, m in zip(self.params, self.masters, strict=True):
                p.copy_(m)
        return norm

    def state_dict(self) -> dict[str, Any]:
        return {"adam": self.adam.state_dict(), "masters": [m.detach() for m in self.masters]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        with torch.no_grad():
            for m, saved in zip(self.masters, state["masters"], strict=True):
                m.copy_(saved)


def train(args: argparse.Namespace, out: Path) -> int:
    from dm_plugin.integrations.megatron import attach_probes

    data = corpus(args.text)
    with job(args):
        model = build(args)
        optimizer = Masters(model, args.lr)
        setup = {n: getattr(args, n) for n in SAME} | {"text": hashlib.sha256(data.numpy().tobytes()).hexdigest()}
        start = load(out / "checkpoint.pt", model, optimizer, setup) if args.resume else 0
        trim(out / "train.jsonl", start)
        session = attach_probes(model, args.probes, out / "dumps", control=out)
        positions = torch.arange(args.tokens, device="cuda").expand(args.batch, -1)
        with session, open(out / "train.jsonl", "a") as log, ExitStack() as stack:
            if (
                args.exclusive
            ):  # set-up overlaps with other arms, training does not: step times are of a GPU of one's own
                stack.enter_context(held(Path(args.exclusive)))
                stack.callback(torch.cuda.empty_cache)  # the next arm finds the memory free
            torch.cuda.reset_peak_memory_stats()
            for step in range(start, args.steps):
                began = time.perf_counter()
                probed = session.begin(step)
                tokens, labels = (x.cuda() for x in batch(data, step, args))
                model.set_is_first_microbatch()  # Megatron's linear layers cast their weights to FP8 anew
                model.zero_grad(set_to_none=True)
                loss = model(tokens, positions, None, labels=labels).float().mean()
                loss.backward()
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step, args)
                norm = float(optimizer.step())
                session.step(step)
                value = float(loss)  # waits for the GPU
                line = {
                    "step": step,
                    "loss": value,
                    "grad_norm": norm,
                    "time": time.perf_counter() - began,
                    "probed": probed,
                }
                line |= {"arm": args.arm, "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20)}
                log.write(json.dumps(line | {"tokens": args.tokens * args.batch}) + "\n")
                log.flush()
                done = step + 1
                if args.save_every and (done == args.steps or done % args.save_every == 0):
                    save(out / "checkpoint.pt", done, model, optimizer, setup)
        describe(args, out, model)
    return 0


def describe(args: argparse.Namespace, out: Path, model: Any) -> None:
    """What ran, with versions: <out>/backend.json."""
    import transformer_engine
    import transformer_engine_torch as tex
    from dm_plugin.integrations.transformer_engine import backend_of, status
    from megatron.core import __version__ as megatron

    about = {
        "arm": args.arm,
        "backend": backend_of(),
        "plugin": status() if args.arm.startswith("dm_") else None,
        "device": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            "transformer_engine": transformer_engine.__version__,
            "megatron_core": megatron,
            "cudnn": str(tex.get_cudnn_version()),
        },
        "shape": {
            **{name: getattr(args, name) for name in ("model", "tokens", "batch", "width", "layers", "steps")},
            **{"head_dim": 128, "heads": args.width // 128, "kv_heads": max(1, args.width // 512), "dtype": "bfloat16"},
        },
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    (out / "backend.json").write_text(json.dumps(about, indent=1))
    print(f"{args.arm}: {about['backend']}")


@contextmanager
def held(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    args = arguments()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    if not args.resume and (out / "train.jsonl").exists():
        raise SystemExit(f"{out} already holds a run; pass --resume to go on with it or choose another --out")
    with alone(out):
        return train(args, out)


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--arm", choices=ARMS, required=True)
    p.add_argument("--model", choices=("gpt", "hybrid"), default="gpt")
    p.add_argument("--linears", choices=("fp8", "bf16"), default="fp8")
    p.add_argument("--out", required=True, help="folder of this run")
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--text", default=None, help="file to train on; default: the standard library's sources")
    p.add_argument("--probes", default=None, help="probe YAML; default: probe on request only")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--tokens", type=int, default=1024)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--width", type=int, default=1024, help="a multiple of 512")
    p.add_argument("--lr", type=float, default=5e-4)
    p.add_argument("--warmup", type=int, default=20)
    p.add_argument("--recompute", choices=("none", "core_attn", "full"), default="none")
    p.add_argument("--save-every", type=int, default=100, help="steps between checkpoints; 0: none at all")
    p.add_argument(
        "--nondeterministic", action="store_true", help="our arms too: let the other layers pick their fastest kernels"
    )
    p.add_argument("--exclusive", default=None, metavar="LOCK", help="a lock file: train while no other run holds it")
    p.add_argument("--resume", action="store_true")
    return p.parse_args()


if __name__ == "__main__":
    sys.exit(main())
