"""Exchange patterns: over which links values of which class move at one tick."""

from __future__ import annotations

import dataclasses
import functools

from optimus_jax.schedule.dataflow import LLM, Payload
from optimus_jax.schedule.task import Pipeline


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A set of links that one exchange moves data over, both ways, for one payload class."""

    payload: Payload
    links: frozenset[tuple[int, int]]


def payloads(pipe: Pipeline) -> tuple[Payload, ...]:
    """The payload classes of a pipeline: LLM values; of each encoder features, and hidden states
    if it has several stages."""
    found = [LLM]
    for k, encoder in enumerate(pipe.encoders):
        found.append(Payload("feature", k))
        if encoder.stages > 1:
            found.append(Payload("hidden", k))
    return tuple(found)


@functools.lru_cache
def alphabet(pipe: Pipeline) -> tuple[Pattern, ...]:
    """All patterns of a pipeline: none; of the LLM even links, odd links, each link, and the wrap
    link if there are several chunks; of each encoder each pipeline's last stage with the LLM's
    entry, then between its stages the even links of all pipelines, the odd ones, and each link. The
    grid alone fixes it, so a schedule never changes the compiled step; patterns of one payload
    class stand together."""
    patterns = [Pattern(LLM, frozenset())]
    for payload in payloads(pipe):
        patterns += dict.fromkeys(
            Pattern(payload, frozenset(s)) for s in _links(payload, pipe) if s
        )
    return tuple(patterns)


def _links(payload: Payload, pipe: Pipeline) -> list[list[tuple[int, int]]]:
    """The links of each pattern of a class."""
    k = payload.encoder
    if payload.content == "llm":
        links = [(s, s + 1) for s in range(pipe.stages - 1)]
        sets = [links[0::2], links[1::2], *([link] for link in links)]
        if pipe.chunks > 1 and pipe.stages > 1:
            sets.append([(0, pipe.stages - 1)])
        return sets
    rows = [pipe.devices_of(k, j) for j in range(pipe.pipelines(k))]
    if payload.content == "feature":
        ends = (row[-1] for row in rows)
        return [[(min(d, pipe.entry), max(d, pipe.entry))] for d in ends if d != pipe.entry]
    links = [(d, d + 1) for row in rows for d in row[:-1]]
    parity = [[link for link in links if (link[0] - rows[0][0]) % 2 == n] for n in (0, 1)]
    return [*parity, *([link] for link in links)]
