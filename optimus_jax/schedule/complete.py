"""Whether a schedule runs everything once, and where it may."""

from __future__ import annotations

from collections import Counter

from optimus_jax.schedule.task import Kind, Pipeline, Schedule, ScheduleError, Task


def check_complete(schedule: Schedule) -> None:
    """Raises ScheduleError unless each LLM task stands once on each device with such layers, and
    the encoder tasks of every encoded microbatch cover each unit and layer of each encoder once
    forward and once backward, on the device that holds the layer and in one pipeline for each
    unit, with no more saved state at a time than the pipeline's cap."""
    pipe = schedule.pipeline
    if len(schedule.orders) != pipe.stages:
        raise ScheduleError(f"{len(schedule.orders)} orders for {pipe.stages} devices")
    covered: Counter[tuple[Kind, int, int, int, int]] = Counter()
    homes: dict[tuple[int, int, int], int] = {}
    for device, order in enumerate(schedule.orders):
        _check_llm(device, order, pipe)
        for task in order:
            if task.inside:
                _check_fused(task, device, pipe)
            if task.encoder_part:
                _check_encoder(task.encoder_part, device, pipe, homes)
                _cover(task.encoder_part, device, pipe, covered)
        check_cap(device, order, pipe)
    for kind in (Kind.EF, Kind.EB):
        for i in sorted(schedule.encoded | {i for _, _, i, _, _ in covered}):
            for k, encoder in enumerate(pipe.encoders):
                for unit in range(encoder.units):
                    for layer in range(encoder.total):
                        count = covered[kind, k, i, unit, layer]
                        if count != 1:
                            task = Task(kind, i, units=(unit,), encoder=k)
                            raise ScheduleError(
                                f"{task} runs layer {layer} {count} times, wanted 1"
                            )


def _check_llm(device: int, order: tuple[Task, ...], pipe: Pipeline) -> None:
    wanted = {
        Task(kind, i, chunk)
        for kind in (Kind.F, Kind.B)
        for i in range(pipe.microbatches)
        for chunk in range(pipe.chunks)
        if pipe.runs(device, chunk)
    }
    counts = Counter(task.llm_part for task in order if task.llm_part)
    for task in sorted(wanted | counts.keys(), key=str):
        if counts[task] != (task in wanted):
            raise ScheduleError(
                f"{task} stands {counts[task]} times on device {device},"
                f" wanted {int(task in wanted)}"
            )


def _check_fused(task: Task, device: int, pipe: Pipeline) -> None:
    assert task.inside
    begin, end = pipe.layers_of(task.inside, device)
    most = pipe.llm_layers[task.chunk * pipe.stages + device]
    if task.inside.kind != task.kind.inside or len(pipe.units_of(task.inside)) != 1:
        raise ScheduleError(
            f"{task} on device {device}: only one unit's EF goes into an F, its EB into a B"
        )
    if end - begin > most:
        raise ScheduleError(
            f"{task} on device {device} has {end - begin} encoder layers inside {most} LLM layers;"
            " there may be as many at most"
        )


def _check_encoder(
    task: Task, device: int, pipe: Pipeline, homes: dict[tuple[int, int, int], int]
) -> None:
    if not 0 <= task.encoder < len(pipe.encoders):
        raise ScheduleError(f"{task} on device {device}: there are {len(pipe.encoders)} encoders")
    sizes = pipe.encoders[task.encoder]
    units, (begin, end) = pipe.units_of(task), pipe.layers_of(task, device)
    if max(units) >= sizes.units or not 0 <= begin < end <= sizes.total:
        raise ScheduleError(
            f"{task} on device {device}: there are {sizes.units} units and {sizes.total} layers"
        )
    first, last = pipe.stage_layers(task.encoder, device)
    if begin < first or end > last:
        raise ScheduleError(f"{task} on device {device}, which has layers {first} to {last}")
    pipeline = pipe.pipeline_of(task.encoder, device)
    for unit in units:
        place = homes.setdefault((task.encoder, task.microbatch, unit), pipeline)
        if place == pipeline:
            continue
        if sizes.stages == 1:
            raise ScheduleError(
                f"{task} stands on device {device}, but unit {unit} of microbatch"
                f" {task.microbatch} is on device {place}, where its saved inputs are"
            )
        raise ScheduleError(
            f"{task} stands in pipeline {pipeline} (device {device}), but unit {unit} of microbatch"
            f" {task.microbatch} is in pipeline {place}"
        )


def _cover(
    task: Task, device: int, pipe: Pipeline, covered: Counter[tuple[Kind, int, int, int, int]]
) -> None:
    begin, end = pipe.layers_of(task, device)
    for unit in pipe.units_of(task):
        for layer in range(begin, end):
            covered[task.kind, task.encoder, task.microbatch, unit, layer] += 1


def most_saved(order: tuple[Task, ...], device: int, pipe: Pipeline, encoder: int) -> int:
    """The most units of an encoder that have saved state on a device at a time."""
    saved = most = 0
    for part in (task.encoder_part for task in order):
        if not part or part.encoder != encoder:
            continue
        if pipe.layers_of(part, device)[0] == pipe.stage_layers(encoder, device)[0]:
            count = len(pipe.units_of(part))
            saved += count if part.kind == Kind.EF else -count
            most = max(most, saved)
    return most


def least_cap(schedule: Schedule) -> int:
    """The least `Pipeline.cap` that a schedule keeps to."""
    pipe, least = schedule.pipeline, 0
    for device, order in enumerate(schedule.orders):
        for k, encoder in enumerate(pipe.encoders):
            most = most_saved(order, device, pipe, k)
            if most:
                least = max(least, (most - 1) * pipe.pipelines(k) // encoder.units + 1)
    return least


def check_cap(device: int, order: tuple[Task, ...], pipe: Pipeline) -> None:
    """Raises ScheduleError if a device holds the saved state of more units than the cap allows."""
    for k in range(len(pipe.encoders)):
        cap = pipe.units_cap(k)
        if cap is None:
            continue
        most = most_saved(order, device, pipe, k)
        if most > cap:
            raise ScheduleError(
                f"device {device} holds the saved state of {most} units of encoder {k} at a time,"
                f" the cap of {pipe.cap} microbatches allows {cap}"
            )
