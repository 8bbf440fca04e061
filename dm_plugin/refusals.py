"""Why a site cannot give a probe: one sentence each, kept in the dump instead of a guess."""

from collections.abc import Iterable, Mapping
from typing import Any

from .sites import Site

TAP_ONLY = ("row_sum", "row_sum_signed", "delta_gap", "max_logit", "entropy", "codes")


def refusals(site: Site, probes: Iterable[str], world: Mapping[str, int], tapped: bool = False) -> dict[str, str]:
    """probe -> why this site cannot give it. tapped: did its tap hand something out in this step?"""
    out: dict[str, str] = {}
    if site.ours or tapped:
        own = getattr(site.tapped, "refuse_probe", {})
        out |= {p: text for p, text in own.items() if p in probes}
    else:
        kind = type(site.module).__name__
        out |= {
            p: f"{kind} hands out no row statistics; only its key gradient can be observed"
            for p in probes
            if p in TAP_ONLY
        }
        text = no_key_sum(site, world)
        if text is not None and "key_col_sum" in probes:
            out["key_col_sum"] = text
    if "gain_share" in probes and site.gains() is None:
        out["gain_share"] = "the layer has no norm with gains on its queries and keys"
    return out


def no_key_sum(site: Site, world: Mapping[str, int]) -> str | None:
    """Why sum_j dK is not zero in exact arithmetic here, so that its value would be no residual."""

    def of(name: str) -> Any:
        own = getattr(site.module, name, None)
        return getattr(site.config, name, None) if own is None else own

    if max(world.get("cp_size", 1), of("context_parallel_size") or 1) > 1:
        return "keys are split over context-parallel ranks, and the sum over a part of the keys is not zero"
    if (of("softmax_type") or "vanilla") != "vanilla" or of("softmax_offset") is not None:
        return "attention sinks take a share of each row, so the sum over keys is not zero"
    if of("attn_logit_softcapping") or of("softcap"):
        return "softcapped logits are not shift invariant, so the sum over keys is not zero"
    return None
