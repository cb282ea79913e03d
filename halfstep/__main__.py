"""The command `halfstep`."""

from __future__ import annotations

import sys

import typer

from halfstep.cli.bench import bench
from halfstep.cli.check import check
from halfstep.cli.doctor import doctor
from halfstep.cli.inspect import inspect
from halfstep.cli.levels import levels
from halfstep.cli.ops import ops
from halfstep.cli.report import report
from halfstep.cli.run import ScriptRaised, run
from halfstep.cli.whatif import whatif
from halfstep.errors import HalfstepError, ScriptError

USAGE_ERROR = 2

app = typer.Typer(
    help="Mixed precision training for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(bench)
app.command()(check)
app.command()(doctor)
app.command()(inspect)
app.command()(levels)
app.command()(ops)
app.command()(report)
app.command(context_settings={"allow_interspersed_args": False})(run)  # what follows the script is the script's
app.command()(whatif)


def main() -> None:
    """Runs the command line; an error that halfstep foresees is one message, not a traceback."""
    raised = None
    try:
        app(prog_name="halfstep")
    except HalfstepError as error:
        print(f"halfstep: {error}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, ScriptError) else USAGE_ERROR)
    except ScriptRaised as error:
        raised = error
    if raised is not None:  # out here, so that what the script raised has no other context
        raised.show()


if __name__ == "__main__":
    main()
