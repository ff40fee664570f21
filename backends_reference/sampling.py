"""Reference sampling: restriction of a distribution and draws from a counter-based generator. R rows, V vocabulary.

What names a draw, and nothing else does: Philox 4x32-10 with

    key      = (low word of the seed, high word of the seed)
    counter  = (token id // 4, low word of the count, high word of the count, 0)

where the count is the number of tokens generated before; output word `token id % 4` belongs to the token id. A word x
becomes u = min((float32(x) + 0.5) * 2**-32, 1 - 2**-24), and the Gumbel noise is -log(-log1p(-u)). Small u, which are
represented most finely, give the large noise that decides a draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halocline.hal.errors import ShapeError
from halocline.hal.op import implements
from halocline.hal.ops.sampling import SamplingBatch, sample

__all__ = ["gumbel_noise", "gumbel_of_words", "philox_4x32", "restrict", "sample_reference"]

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


@implements(sample)
def sample_reference(logits_RV: Tensor, batch: SamplingBatch) -> Tensor:
    """See the contract. Tokens whose logit equals the smallest one kept by top-k or top-p are kept as well.

    Rows are worked on one by one, so that a row's bits cannot depend on its neighbours.
    """
    rows = logits_RV.shape[0]
    parts = (batch.temperature_R, batch.top_k_R, batch.top_p_R, batch.min_p_R, batch.seeds_R, batch.counters_R)
    if any(part.shape != (rows,) for part in parts):
        raise ShapeError(f"{rows} rows of logits, parameters of shapes {[tuple(part.shape) for part in parts]}")
    ids_R = torch.full((rows,), -1, dtype=torch.int32, device=logits_RV.device)
    for row in range(rows):
        logits_V = logits_RV[row].float()
        if not bool(logits_V.max().isfinite()):  # NaN, infinity, or nothing allowed
            continue
        temperature = float(batch.temperature_R[row])
        if temperature == 0.0:
            ids_R[row] = _first_largest(logits_V)
            continue
        kept_V = restrict(
            logits_V,
            temperature=temperature,
            top_k=int(batch.top_k_R[row]),
            top_p=float(batch.top_p_R[row]),
            min_p=float(batch.min_p_R[row]),
        )
        noise_V = gumbel_noise(int(batch.seeds_R[row]), int(batch.counters_R[row]), logits_V.shape[0])
        ids_R[row] = _first_largest(kept_V + noise_V.to(kept_V.device))
    return ids_R


def restrict(logits_V: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Logits over the temperature, -inf where top-k, top-p or min-p, in that order, drop the token.

    top-p works on the probabilities of what top-k kept; min-p compares with the largest probability.
    """
    scaled_V = logits_V / temperature
    vocabulary = scaled_V.shape[0]
    if 0 < top_k < vocabulary:
        smallest = scaled_V.topk(top_k).values[-1]
        scaled_V = scaled_V.masked_fill(scaled_V < smallest, -torch.inf)
    if top_p < 1.0:
        sorted_V, _ = scaled_V.sort(descending=True)
        probabilities_V = torch.softmax(sorted_V, dim=0)
        before_V = probabilities_V.cumsum(0) - probabilities_V
        num_kept = max(int((before_V < top_p).sum()), 1)
        scaled_V = scaled_V.masked_fill(scaled_V < sorted_V[num_kept - 1], -torch.inf)
    if min_p > 0.0:
        ratio_V = torch.exp(scaled_V - scaled_V.max())
        scaled_V = scaled_V.masked_fill(ratio_V < min_p, -torch.inf)
    return scaled_V


def gumbel_noise(seed: int, count: int, vocabulary: int) -> Tensor:
    """float32 Gumbel noise of each token id, from the seed and the number of tokens generated before."""
    groups = torch.arange((vocabulary + 3) // 4, dtype=torch.int64)
    zero = torch.zeros_like(groups)
    counter = (groups, zero + (count & _WORD), zero + ((count >> 32) & _WORD), zero)
    words = torch.stack(philox_4x32(counter, (seed & _WORD, (seed >> 32) & _WORD)), dim=1).reshape(-1)[:vocabulary]
    return gumbel_of_words(words)


def gumbel_of_words(words: Tensor) -> Tensor:
    """float32 Gumbel noise of uniform 32-bit words; finite for every word."""
    uniform = torch.clamp((words.float() + 0.5) * 2.0**-32, max=1.0 - 2.0**-24)
    # The logarithms are taken in float64 and rounded: vectorised float32 ones may differ with a lane's position.
    return (-torch.log(-torch.log1p(-uniform.double()))).float()


def philox_4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox on int64 tensors that hold 32-bit words.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011, section 3.3 and table 2.
    """
    word_0, word_1, word_2, word_3 = counter
    key_0, key_1 = key
    for _ in range(_ROUNDS):
        high_0, low_0 = _multiply(_MULTIPLIERS[0], word_0)
        high_1, low_1 = _multiply(_MULTIPLIERS[1], word_2)
        word_0, word_1, word_2, word_3 = high_1 ^ word_1 ^ key_0, low_1, high_0 ^ word_3 ^ key_1, low_0
        key_0, key_1 = (key_0 + _WEYL[0]) & _WORD, (key_1 + _WEYL[1]) & _WORD
    return word_0, word_1, word_2, word_3


def _multiply(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low words of a 32 by 32 bit product, in halves so that int64 does not overflow."""
    low_half, high_half = word & 0xFFFF, word >> 16
    low_product = multiplier * low_half
    high_product = multiplier * high_half + (low_product >> 16)
    return high_product >> 16, ((high_product & 0xFFFF) << 16) | (low_product & 0xFFFF)


def _first_largest(values_V: Tensor) -> Tensor:
    """Lowest id among the largest values; `argmax` leaves a tie open."""
    return (values_V == values_V.max()).nonzero()[0, 0]
