"""The commands `halfstep run`, which runs a script in mixed precision, and `halfstep report`, which draws its log."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from halfstep.adapters.script.run import Ran, own
from halfstep.adapters.script.run import run as run_script
from halfstep.cli.options import Low, Moments, Products, Quiet, activity, html_pages, stdout
from halfstep.errors import LogError, PlanError
from halfstep.explain.report.log import LOG_NAME, RunLog
from halfstep.explain.report.run import PROCESSES, first_overflow, read_log, rows_of, shown
from halfstep.explain.report.tables import table
from halfstep.records import amount, skips_in_words
from halfstep.train.session.session import Sink

Script = Annotated[
    list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="The script, or with -m the module, and its arguments.")
]
Level = Annotated[str | None, typer.Option("--level", help="O0, O1, O2 or O3; O1 by default.")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="A plan file to use instead of a level.")]
Report = Annotated[Path | None, typer.Option("--report", help="A folder for the run's log and HTML page.")]
Module = Annotated[bool, typer.Option("-m", help="Run a module, as python -m does.")]


class ScriptRaised(BaseException):
    """Carries an exception of the user's script past handlers that would report it as an error of `halfstep run`."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def show(self) -> None:
        """Raises the script's exception with its traceback, as if the script ran alone."""
        trace, print_it = self.error.__traceback__, sys.excepthook
        sys.excepthook = lambda kind, error, _: print_it(kind, error.with_traceback(trace), trace)
        raise self.error


def run(  # noqa: PLR0913  # each is an option of the command, described above
    script: Script,
    level: Level = None,
    low: Low = None,
    plan: PlanFile = None,
    moments: Moments = None,
    products: Products = None,
    report: Report = None,
    module: Module = False,
    quiet: Quiet = False,
) -> None:
    """Run a script that does not use mixed precision, and train its models in mixed precision."""
    if level is not None and plan is not None:
        raise PlanError(f"both --level {level} and --plan {plan} were passed; pass only one of them")
    recorded = None if report is None else _Recorded(report)
    name, *arguments = script
    late = re.search(r"--(level[ =]O[0-3]|low[ =](bf|fp)16)(?= |$)", " ".join(arguments))
    known = Path(name).read_bytes() if late and Path(name).is_file() else b""  # its own options are no mistake
    if late and re.split(b"[ =]", late[0].encode())[0] not in known and not quiet and not (level or low or plan):
        print(f"halfstep: {name} gets {late[0]}; options of halfstep stand before the script", file=sys.stderr)
    done: list[Ran] = []

    def ended(ran: Ran) -> None:
        done.append(ran)
        page = "" if recorded is None else recorded.close(ran)
        if ran.rank == 0 and not quiet:
            print(f"halfstep: {summary(ran)}{page}", file=sys.stderr, flush=True)

    try:
        run_script(
            name,
            arguments,
            module=module,
            plan=level if plan is None else str(plan),
            low=low,
            moments=moments,
            products=products,
            sinks=(lambda rank: ()) if recorded is None else recorded.sinks,
            observe=recorded is not None,
            ended=ended,
        )
    except BaseException as error:
        if not done or done[0].error is not error:  # not of the script
            raise
        raised = ScriptRaised(own(error))  # again: it has come through here since
    else:
        return
    raise raised


def summary(ran: Ran) -> str:
    """Returns one line on how a script's run went."""
    it = ran.trained
    if it is None and ran.brings is None and not ran.outside:
        return f"no model was trained in this process, so nothing ran in mixed precision; {ran.seconds:.1f} s"
    parts = [f"the script uses {ran.brings}; no session was added"] if ran.brings else []
    if it is not None:
        parts += [
            it.level if it.level == "O0" else f"{it.level} {it.low}",
            f"{it.steps} steps",
            skips_in_words(f"{it.skipped} skipped", it.bad_losses),
        ]
    if ran.outside:
        parts.append(f"not trained under the plan but in plain fp32: {', '.join(ran.outside)}")
    parts.append(f"{ran.seconds:.1f} s")
    if it is not None:
        parts += [f"{kind} {amount(size)}" for kind, size in it.memory.items() if size]
        parts += [f"peak on the GPU {amount(ran.peak)}"] if ran.peak else []
    return ", ".join(parts)


class _Recorded:
    """The log of a run, and the HTML page that is made from the log."""

    def __init__(self, folder: Path) -> None:
        self._pages = html_pages("--report")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LogError(f"--report {folder} cannot be created: {error.strerror}; name another folder") from None
        self._path = folder / LOG_NAME
        self._log: RunLog | None = None

    def sinks(self, rank: int) -> Sequence[Sink]:
        if self._log is not None:
            self._log.close()
        self._log = RunLog(self._path) if rank == 0 else None
        return () if self._log is None else (self._log,)

    def close(self, ran: Ran) -> str:
        """Closes the log, makes the page, and returns a note on the page for the summary line."""
        if self._log is None:
            return ""
        self._log.__exit__(None if ran.error is None else type(ran.error), ran.error, None)
        page = self._path.with_suffix(".html")
        try:
            page.write_text(self._pages.page_html(read_log(self._path)), encoding="utf-8")
        except (OSError, LogError) as error:
            return f"; no page could be made: {error}"
        return f"; {shown(page)}"


# ---- the page of a log
Logs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", help="A run log, or its folder; for a run of several processes all their logs."),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="The page to write; by default RUN.html beside the (first) log.")
]
JudgedIn = Annotated[
    str | None, typer.Option("--low", help="The format to judge values by; by default the run's low format.")
]


def report(logs: Logs, output: Output = None, low: JudgedIn = None, quiet: Quiet = False) -> None:
    """Make one HTML page of a run log: exponent histograms, lost and saturated shares, loss, scale, verdicts."""
    pages = html_pages("halfstep report")
    with activity("reading the log, and drawing the page", quiet=quiet):
        runs = [read_log(log) for log in logs]
        rows = rows_of(runs) if len(runs) > 1 else ()
        found = rows[0].run if rows else runs[0]
        page = found.path.with_suffix(".html") if output is None else output
        if page.resolve() in [run.path.resolve() for run in runs]:
            raise LogError(f"the page would overwrite the log {page}; name another file with --output")
        text = pages.page_html(found, low, processes=rows)
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LogError(f"{page} cannot be written: {error.strerror}; name another file with --output") from None
    for run in runs:
        for note in run.notes:
            print(f"note: {shown(run.path)}: {note}" if rows else f"note: {note}")
    if rows:
        stdout().print(table(rows, PROCESSES, words=PROCESSES))
        if said := first_overflow(rows):
            print(said)
    print(shown(page))
