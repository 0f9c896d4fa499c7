"""Programs as text, for tests that compare them with a picture."""

from __future__ import annotations

from optimus_jax.schedule.program import LLM, Program, alphabet


def picture(program: Program) -> str:
    """A line for each tick: the devices' tasks, then what moves: `0>1` an LLM value, `1>0:2` two
    units of features or of their gradients, `1>2h:1` one of hidden states."""
    at = program.columns
    lines = []
    for tick, pattern in enumerate(alphabet(program.pipeline)[k] for k in program.pattern):
        devices = range(program.pipeline.stages)
        cells = [str(program.task(tick, d) or ".").ljust(10) for d in devices]
        moves = []
        for sender, receiver in sorted(p for a, b in pattern.links for p in ((a, b), (b, a))):
            row = program.table[tick, sender]
            units, payload = int((row[at["e_send"]] >= 0).sum()), pattern.payload
            if payload != LLM and units:
                hidden = "h" if payload.content == "hidden" else ""
                moves.append(f"{sender}>{receiver}{hidden}:{units}")
            elif payload == LLM and row[at["send"]] >= 0:
                moves.append(f"{sender}>{receiver}")
        lines.append(f"{' '.join(cells)} | {' '.join(moves)}".rstrip())
    return "\n".join(lines)
