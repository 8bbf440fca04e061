"""The one scalar a row that the softmax backward subtracts, dS = P (dP_hat - delta), three ways.

    stale       <dO, O>                     from numbers that the gradient did not use
    consistent  <dO_hat, O>                 the rounded dO, the saved O
    matched     sum_j P_ij dP_hat_ij        from the very operands of the gradient: rows of dS sum to zero

Matched is computed in the compensated form  d0 + sum_j P (dP_hat - d0) / sum_j P  with d0 = <dO_hat, O>: the same quantity with a
smaller rounding error on sharp rows. Source: Delta-Matching (arXiv 2609.37852), section 4 and appendix C.4.
"""

from torch import Tensor

MODES = ("matched", "consistent", "stale")
RESEARCH_MODES = ("matched_plain",)


def stale(o: Tensor, do: Tensor) -> Tensor:
    """<dO, O> over D. o, do: (..., T, D) -> (..., T)."""
    return (do * o).sum(-1)


def consistent(o: Tensor, do_hat: Tensor) -> Tensor:
    """<dO_hat, O> over D. o, do_hat: (..., T, D) -> (..., T)."""
    return (do_hat * o).sum(-1)


def matched_plain(p: Tensor, dp_hat: Tensor) -> Tensor:
    """sum_j P_ij dP_hat_ij. p, dp_hat: (..., T, Tk) -> (..., T)."""
    return (p * dp_hat).sum(-1)


def matched(p: Tensor, dp_hat: Tensor, d0: Tensor) -> Tensor:
    """d0 + sum_j P (dP_hat - d0) / sum_j P; rows without a key give d0. p, dp_hat: (..., T, Tk), d0: (..., T) -> (..., T)."""
    z = p.sum(-1)
    e = (p * (dp_hat - d0.unsqueeze(-1))).sum(-1)
    return d0 + e / z.masked_fill(z == 0, 1.0)
