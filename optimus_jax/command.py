"""What all commands share: flags, configuration errors in words, and the JSON line at the end."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from absl import flags, logging
from ml_collections import ConfigDict, config_flags

from optimus_jax import cluster, gpu_settings, launchers, xla_flags
from optimus_jax.config import Config, filled_in, from_config_dict
from optimus_jax.config_checks import ConfigError, did_you_mean
from optimus_jax.cost.costs import Costs
from optimus_jax.errors import UserError as UserError
from optimus_jax.plan.cluster import Cluster
from optimus_jax.plan.cluster_checks import from_config_dict as cluster_from_config_dict
from optimus_jax.plan.cluster_checks import is_cluster
from optimus_jax.schedule.notation import ScheduleError

flags.DEFINE_bool("json", False, "Print one JSON object as the last line of stdout.")


TIMESTAMPS = "OPTIMUS_TIMESTAMPS"  # set by job files: lines begin with the time
DEFAULT_CONFIG = "configs/digits.py"


def define_config(default: str = DEFAULT_CONFIG) -> None:
    """Declares --config=FILE[:argument], --config.key=value and --workdir=DIR. Commands that use
    one another may all call it; the first one's default holds."""
    if "config" in flags.FLAGS:
        return
    # Overrides are read here, not by ml_collections, which ends in a traceback at a wrong one.
    flags.DEFINE_string("config", default, "The run's configuration.")
    flags.DEFINE_string(
        "workdir", None, "Folder of the run (default: runs/ and the config's name)."
    )


def define_costs() -> None:
    """Declares --costs=FILE."""
    if "costs" not in flags.FLAGS:
        flags.DEFINE_string(
            "costs", None, "Measured costs, as python -m optimus_jax.profile writes."
        )


def costs() -> Costs | None:
    """The costs that the command line names, None without any.

    Raises UserError if the file holds none.
    """
    name = flags.FLAGS.costs
    if not name:
        return None
    try:
        return Costs.load(name)
    except OSError as error:
        raise UserError(f"--costs={name}: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"--costs={name}: {error}") from None


_takes_clusters = False  # whether the command that runs plans clusters too


def run(
    main: Callable[[], int | None], takes_clusters: bool = False, runs_here: bool = True
) -> NoReturn:
    """Parses the command line and ends the process with main's exit code. 2 for a wrong command
    line, 130 for Ctrl-C; both without a traceback.

    With `takes_clusters` the configuration may be a cluster's, which `job` returns. Without
    `runs_here` nothing runs on this machine's devices, and XLA_FLAGS stays what the user has set.
    """
    global _takes_clusters
    _takes_clusters = takes_clusters
    logging.set_verbosity(logging.ERROR)  # orbax warns of what is meant
    try:
        if "--help" in sys.argv[1:]:
            print(_help())
            sys.exit(0)
        launchers.adopt()
        if runs_here:
            for note in filter(None, (launchers.note(), cluster.missing_cuda())):
                if is_first():
                    print(note, file=sys.stderr, flush=True)
            if cluster.platform() == "gpu":
                gpu_settings.print_by_line()
            xla_flags.apply()
        _parse(sys.argv)
        code = main() or 0
    except ConfigError as error:
        code = _complain([f"{len(error.errors)} error(s) in the configuration:", *error.errors])
    except (UserError, flags.Error) as error:
        code = _complain([str(error)])
    except ScheduleError as error:
        code = _complain([f"there is no plan for this configuration: {error}"])
    except KeyboardInterrupt:
        code = _complain(["interrupted"], 130)
    sys.stdout.flush()
    sys.exit(code)


def _help() -> str:
    """What the command does, and its options."""
    lines = [(sys.modules["__main__"].__doc__ or "").strip(), ""]
    for module, own in flags.FLAGS.flags_by_module_dict().items():
        if module.startswith("optimus_jax") or module == sys.argv[0]:
            lines += [f"  --{flag.name}: {flag.help}" for flag in own]
    if "config" in flags.FLAGS:
        lines += ["  --config.KEY=VALUE: changes one value of the configuration."]
    return "\n".join(lines)


def _complain(lines: list[str], code: int = 2) -> int:
    print("\n  ".join(lines), file=sys.stderr, flush=True)
    if cluster.count() > 1:
        sys.stdout.flush()
        os._exit(code)  # jax's own exit would wait for the other processes
    return code


def _parse(argv: list[str]) -> None:
    """Fills flags.FLAGS. All wrong overrides of the config are reported together, and with them
    what is wrong with the configuration that the right ones make."""
    words = argv
    if "config" in flags.FLAGS:
        _, wrong = _overridden(argv)
        if wrong:
            raise ConfigError(wrong)
        words = [word for word in argv if not _is_override(word)]
    rest = flags.FLAGS(words)[1:]
    if rest:
        raise UserError(f"not understood: {' '.join(rest)} (options look like --name=value)")


def _is_override(word: str) -> bool:
    return word.startswith(("--config.", "-config."))


def _overridden(argv: list[str]) -> tuple[ConfigDict, list[str]]:
    """The values of the config file with the overrides of the command line, and all errors."""
    values = _load(argv)
    errors = []
    for word in filter(_is_override, argv[1:]):
        name, equals, text = word.partition("=")
        path = name.lstrip("-").split(".")[1:]
        group: Any = values
        for k, key in enumerate(path):
            if not isinstance(group, ConfigDict) or key not in group:
                valid = list(group) if isinstance(group, ConfigDict) else []
                where = ".".join(["config", *path[: k + 1]])
                errors.append(f"{where}: unknown{did_you_mean(key, valid)}")
                break
            if k < len(path) - 1:
                group = group[key]
        else:
            errors += _override(group, path, equals, text)
    try:
        _made(values)
    except ConfigError as error:
        errors += error.errors
    return values, errors


def _override(group: ConfigDict, path: list[str], equals: str, text: str) -> list[str]:
    """Sets one value; says what is wrong if it has not the type of the old one."""
    key, where, old = path[-1], ".".join(["config", *path]), group[path[-1]]
    if isinstance(old, ConfigDict):
        return [f"{where}: a group of settings; set one of {', '.join(old)}"]
    if not equals:
        return [f"{where}: no value; write --{where}=value"]
    if isinstance(old, str):
        group[key] = text
        return []
    try:
        value = ast.literal_eval(text)
        if isinstance(old, float) and type(value) is int:
            value = float(value)
    except (ValueError, SyntaxError, TypeError, OverflowError):
        value = text
    if type(value) is not type(old):
        noun = {int: "a whole number", float: "a number", bool: "True or False"}
        return [f"{where}: expected {noun.get(type(old), 'a value')}, got {text!r}"]
    group[key] = value
    return []


def _load(argv: list[str]) -> ConfigDict:
    """The config file that the command line names, without overrides."""
    name = _config_name(argv)
    path = name.partition(":")[0]
    if not pathlib.Path(path).is_file():
        raise UserError(f"--config={name}: no file {path!r}; there is {_examples()}")
    parsed = flags.FlagValues()
    line = ["", f"--config={name}"]
    config_flags.DEFINE_config_file("config", flag_values=parsed, sys_argv=line)
    try:
        parsed(line)
        values = parsed["config"].value
    except UserError:
        raise
    except Exception as error:
        lines = [f"{type(error).__name__}: {error}"]
        if "Traceback" in lines[0]:  # of an error inside the file; its last line says what
            lines = lines[0].strip().splitlines()[-1:]
        raise UserError(f"--config={name}: {lines[0]}") from error
    if not isinstance(values, ConfigDict):
        raise UserError(f"--config={name}: get_config() must return a ConfigDict, not {values!r}")
    given = values.to_dict()
    return values if is_cluster(given) else ConfigDict(filled_in(given))


def _config_name(argv: list[str]) -> str:
    name = str(flags.FLAGS["config"].default)
    for word, following in zip(argv[1:], [*argv[2:], name], strict=False):
        if word in ("--config", "-config"):
            name = following
        elif word.startswith(("--config=", "-config=")):
            name = word.partition("=")[2]
    return name


def _examples() -> str:
    return ", ".join(sorted(map(str, pathlib.Path("configs").glob("*.py")))) or "none in configs/"


def _made(values: ConfigDict) -> Config | Cluster:
    """The checked configuration. Raises ConfigError, and UserError if it is a cluster's and this
    command does not plan."""
    given = values.to_dict()
    if not is_cluster(given):
        return from_config_dict(given)
    if not _takes_clusters:
        raise UserError(
            f"--config={_config_name(sys.argv)}: describes a cluster's job (gpus), which"
            " python -m optimus_jax.plan answers; other commands take a training run's"
        )
    return cluster_from_config_dict(given)


def job() -> Config | Cluster:
    """The checked configuration of this command line, of a training run or of a cluster."""
    return _made(_overridden(sys.argv)[0])


def config() -> Config:
    """The checked configuration of this command line, of a training run."""
    return from_config_dict(_overridden(sys.argv)[0].to_dict())


def workdir() -> pathlib.Path:
    """The folder of the run; not yet made."""
    if flags.FLAGS.workdir:
        return pathlib.Path(flags.FLAGS.workdir)
    path, _, argument = _config_name(sys.argv).partition(":")
    return pathlib.Path("runs") / "_".join(filter(None, (pathlib.Path(path).stem, argument)))


def is_first() -> bool:
    """Whether this is the process that speaks for the run."""
    return os.environ.get("JAX_PROCESS_ID", "0") == "0"


def say(text: str) -> None:
    """A line for people, from the first process. That nobody reads any more ends no run."""
    if is_first():
        stamp = time.strftime("%F %T ") if os.environ.get(TIMESTAMPS) else ""
        try:
            print("\n".join(stamp + line for line in text.split("\n")), flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def emit(values: dict[str, Any]) -> None:
    """The JSON line, from the first process; nothing may be printed after it."""
    if is_first():
        print(json.dumps(values, allow_nan=False), flush=True)
