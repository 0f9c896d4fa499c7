"""Costs: seconds of each kind of work, by layer, and of transfers and collectives."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any, TypeVar

from optimus_jax.config import Config
from optimus_jax.errors import UserError
from optimus_jax.schedule.simulate import Durations, EncoderDurations
from optimus_jax.schedule.task import Pipeline


@dataclasses.dataclass(frozen=True)
class Pass:
    """Seconds of one forward, and of its backward with what it computes again."""

    forward: float
    backward: float


NOTHING = Pass(0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class EncoderCosts:
    """Seconds of an encoder's parts, of one unit on one device: the share of a microbatch's
    pictures that the configuration's own pipeline cuts it into. `feature_exchange` is a transfer of
    features between two devices, `hidden_exchange` one between two of the encoder's stages (None:
    as one of LLM values)."""

    layer: Pass
    input_embedding: Pass
    projector: Pass
    feature_exchange: float | None = None
    hidden_exchange: float | None = None

    def durations(self, layers: int, share: float, alone: bool) -> EncoderDurations:
        """Of units that are `share` times as large; without exchanges on a device `alone`."""

        def times(way: str) -> tuple[float, ...]:
            found = [getattr(self.layer, way)] * layers
            found[0] += getattr(self.input_embedding, way)
            found[-1] += getattr(self.projector, way)
            return tuple(share * seconds for seconds in found)

        moves = (None, None) if alone else (self.feature_exchange, self.hidden_exchange)
        return EncoderDurations(times("forward"), times("backward"), *moves)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds on one device. LLM parts are of one microbatch, encoder parts of one encoder unit.

    `source` says where the numbers come from: 'analytic' ones are estimates from operation counts
    and a table of chips, not measurements. `llm_task` is what an LLM task takes beside its layers.
    `head` is forward with its backward, both run by the last stage's F. `encoders` has those of
    each encoder by name. `exchange` is one transfer of an LLM payload between two devices.
    `gather` and `scatter` are the collectives over the LLM's replicas before and after a device's
    tasks, beside which encoder tasks run if there is `overlap`; `window` is how long those of one
    LLM layer keep the device waiting, so that an encoder layer fused with it hides. `epilogue` is
    the rest of a step: reductions that nothing runs beside, norm, optimiser, start and end.
    """

    source: str
    llm_layer: Pass
    llm_embedding: Pass
    head: float
    encoders: dict[str, EncoderCosts]
    exchange: float
    epilogue: float
    llm_task: Pass = NOTHING
    gather: float = 0.0
    scatter: float = 0.0
    overlap: bool = False
    window: Pass = NOTHING

    def durations(self, config: Config, pipe: Pipeline | None = None) -> Durations:
        """The seconds of each task and transfer, of the configuration's pipeline or of another with
        the same model and microbatches, such as that of the method `balanced`. Where its encoder
        units are larger or smaller, so are their seconds.

        Raises UserError if an encoder of the model has no costs.
        """
        own = config.pipeline
        pipe = pipe or own
        missing = [name for name in config.model.encoders if name not in self.encoders]
        if missing:
            raise UserError(
                f"costs of {', '.join(self.encoders)} say nothing of {' and '.join(missing)}:"
                " they are of another model"
            )

        def stages(way: str) -> list[float]:
            task, layer = getattr(self.llm_task, way), getattr(self.llm_layer, way)
            return [
                task + n * layer if v >= pipe.first_stage else 0.0
                for v, n in enumerate(pipe.llm_layers)
            ]

        forward, backward = stages("forward"), stages("backward")
        forward[pipe.first_stage] += self.llm_embedding.forward
        backward[pipe.first_stage] += self.llm_embedding.backward
        forward[-1] += self.head
        encoders = tuple(
            self.encoders[name].durations(
                sizes.total, before.units / sizes.units, alone=pipe.stages == 1
            )
            for name, sizes, before in zip(
                config.model.encoders, pipe.encoders, own.encoders, strict=True
            )
        )
        return Durations(
            tuple(forward),
            tuple(backward),
            encoders,
            transfer=self.exchange if pipe.stages > 1 else 0.0,
            epilogue=self.epilogue,
            gather=self.gather,
            scatter=self.scatter,
            overlap=self.overlap,
            # without it the executor runs no fused tasks
            window=dataclasses.astuple(self.window) if config.parallel.fuse else (0.0, 0.0),
        )

    def save(self, path: str | pathlib.Path) -> None:
        pathlib.Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Costs:
        """Costs that `save` wrote, or those in a profile (measure/profile.py).

        Raises OSError if there is no such file, ValueError if it holds no costs.
        """
        values: dict[str, Any] = json.loads(pathlib.Path(path).read_text())
        try:
            values = dict(values.get("costs", values))
            encoders = {
                name: _built(EncoderCosts, part)
                for name, part in values.pop("encoders", {}).items()
            }
            if not encoders:
                raise TypeError("no encoder")
            return _built(cls, values, encoders=encoders)
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not costs: {error}") from None


C = TypeVar("C", "Costs", "EncoderCosts")


def _built(kind: type[C], values: dict[str, Any], **ready: Any) -> C:
    """A dataclass of seconds from JSON. Raises TypeError for a part that is none."""
    kinds = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    parts: dict[str, Any] = {}
    for name, value in values.items():
        wanted = kinds.get(name, "")
        if wanted == "Pass":
            value = Pass(**value)
        seconds = list(dataclasses.astuple(value)) if wanted == "Pass" else [value]
        if wanted in ("str", "bool"):
            sound = type(value).__name__ == wanted
        elif value is None:
            sound = wanted == "float | None"
        else:
            sound = all(type(s) in (int, float) and 0 <= s < float("inf") for s in seconds)
        if not sound:
            raise TypeError(f"{name} is {value!r}, not {NOUNS.get(wanted, 'seconds')}")
        parts[name] = value
    return kind(**parts, **ready)


NOUNS = {"str": "a word", "bool": "true or false"}


def emulated(config: Config) -> Costs:
    """Costs that tasks of an emulated run sleep for (config.emulate): a chunk with the mean number
    of layers takes what is said there, others in proportion; each encoder takes the same, however
    many stages it has; embedding, head and the encoder's ends take nothing. Exchanges, collectives
    and epilogue are not emulated: 0."""
    e, pipe = config.emulate, config.pipeline
    stage = e.chunk_forward_s * pipe.chunks
    layer = e.chunk_forward_s * pipe.virtual_stages / sum(pipe.llm_layers)
    encoders = {}
    for name, sizes in zip(config.model.encoders, pipe.encoders, strict=True):
        part = stage / (sizes.units * sizes.total)
        costs = Pass(part * e.encoder, part * e.encoder_backward)
        encoders[name] = EncoderCosts(costs, NOTHING, NOTHING)
    return Costs(
        source="emulated",
        llm_layer=Pass(layer, layer * e.backward),
        llm_embedding=NOTHING,
        head=0.0,
        encoders=encoders,
        exchange=0.0,
        epilogue=0.0,
    )
