"""How long tasks and transfers take."""

from __future__ import annotations

import dataclasses

from optimus_jax.schedule.dataflow import LLM, Payload
from optimus_jax.schedule.task import Kind, Pipeline, ScheduleError, Task


@dataclasses.dataclass(frozen=True)
class EncoderDurations:
    """Seconds of one encoder's layers, one entry for each layer of the whole encoder, of one unit;
    the first includes the patch embedding, the last the projector. `feature_transfer` and
    `hidden_transfer`: an exchange of its features, and of what goes from one of its stages to the
    next; None stands for the `transfer` of LLM values."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    feature_transfer: float | None = None
    hidden_transfer: float | None = None


@dataclasses.dataclass(frozen=True)
class Durations:
    """Seconds that tasks and transfers take.

    `forward`, `backward`: one entry for each virtual stage, 0 for first ones without LLM layers.
    `transfer`: an exchange of LLM values. `epilogue`: the optimiser, and what else follows all
    tasks. `gather`, `scatter`: the collectives over replicas before a device's first LLM task and
    after its last one; if `overlap`, encoder tasks run beside them. `window`: how long the
    collectives inside one LLM layer's forward and backward keep the device waiting; there the
    layers of an encoder task inside the LLM task hide.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    encoders: tuple[EncoderDurations, ...] = ()
    transfer: float = 0.0
    epilogue: float = 0.0
    gather: float = 0.0
    scatter: float = 0.0
    overlap: bool = False
    window: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        empty = next((v for v, time in enumerate(self.forward) if time), len(self.forward))
        for name in ("forward", "backward"):
            times = getattr(self, name)
            if any(times[:empty]) or min(times[empty:], default=0.0) <= 0:
                raise ScheduleError(f"durations of {name} must be positive: {times}")
        moves = [t or 0.0 for e in self.encoders for t in (e.feature_transfer, e.hidden_transfer)]
        others = self.epilogue, self.gather, self.scatter, *self.window
        if min(self.transfer, *others, *moves) < 0:
            raise ScheduleError(
                "transfers, collectives, windows and epilogue must not take negative time"
            )

    def travel(self, payload: Payload) -> float:
        """Seconds of an exchange of a class."""
        if payload == LLM:
            return self.transfer
        encoder = self.encoders[payload.encoder]
        feature = payload.content == "feature"
        own = encoder.feature_transfer if feature else encoder.hidden_transfer
        return self.transfer if own is None else own

    @classmethod
    def uniform(
        cls,
        pipe: Pipeline,
        forward: float = 1.0,
        backward: float = 2.0,
        encoder: float = 1.0,
        encoder_backward: float | None = None,
    ) -> Durations:
        """`forward` and `backward` of a whole stage, `encoder` of a whole microbatch of images in
        each encoder; its backward defaults to `encoder` * `backward` / `forward`."""
        if encoder_backward is None:
            encoder_backward = encoder * backward / forward
        times = []
        for sizes in pipe.encoders:
            piece = 1 / (sizes.units * sizes.total)
            times.append(
                EncoderDurations(
                    (encoder * piece,) * sizes.total, (encoder_backward * piece,) * sizes.total
                )
            )
        runs = [float(v >= pipe.first_stage) for v in range(pipe.virtual_stages)]
        return cls(
            tuple(forward / pipe.chunks * r for r in runs),
            tuple(backward / pipe.chunks * r for r in runs),
            tuple(times),
        )

    def of(self, task: Task, device: int, pipe: Pipeline) -> float:
        """Seconds of `task` on `device`. Of a fused one: both its parts, less what hides in the
        windows of the LLM's layers, but never less than either part alone."""
        if task.kind == Kind.F:
            alone = self.forward[task.chunk * pipe.stages + device]
        elif task.kind == Kind.B:
            alone = self.backward[task.chunk * pipe.stages + device]
        else:
            return sum(self._layers(task, device, pipe)) * len(pipe.units_of(task))
        if not task.inside:
            return alone
        layers = self._layers(task.inside, device, pipe)
        window = self.window[task.kind == Kind.B]
        both = alone + sum(layers) - sum(min(window, layer) for layer in layers)
        return max(both, sum(layers))

    def _layers(self, task: Task, device: int, pipe: Pipeline) -> tuple[float, ...]:
        """Seconds of each layer of an encoder task, of one unit."""
        times = self.encoders[task.encoder]
        layers = times.forward if task.kind == Kind.EF else times.backward
        first, end = pipe.layers_of(task, device)
        if end > len(layers):
            raise ScheduleError(f"{task} runs {end} encoder layers, durations are of {len(layers)}")
        return layers[first:end]
