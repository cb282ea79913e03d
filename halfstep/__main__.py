"""The command `halfstep`."""

from __future__ import annotations

import platform
import re
import sys
from typing import Annotated

import torch
import typer

from halfstep.cli.bench import bench
from halfstep.cli.plans import doctor, levels, ops
from halfstep.cli.run import ScriptRaised, report, run
from halfstep.cli.step import check, inspect, whatif
from halfstep.errors import HalfstepError, ScriptError
from halfstep.pages import DIAGNOSIS, FOLDER, FRONT, GUIDE, LEVELS, PLANS, SEEING, SLOWER, more
from halfstep.version import __version__
from halfstep_command import to_the_end

USAGE_ERROR = 2

app = typer.Typer(
    help="Mixed precision training for PyTorch.",
    epilog=f"{more(FRONT)}; docs/ is {FOLDER}",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command(epilog=more(LEVELS))(bench)
app.command(epilog=more(DIAGNOSIS))(check)
app.command(epilog=more(LEVELS))(doctor)
app.command(epilog=more(SLOWER))(inspect)
app.command(epilog=more(LEVELS))(levels)
app.command(epilog=more(PLANS))(ops)
app.command(epilog=more(SEEING))(report)
# what follows the script's name is the script's
app.command(epilog=more(GUIDE), context_settings={"allow_interspersed_args": False})(run)
app.command(epilog=more(DIAGNOSIS))(whatif)


def _tell_version(asked: bool) -> None:
    if asked:
        print(f"halfstep {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_tell_version, help="Print the versions and end.")]


@app.callback()
def _options(version: Version = False) -> None:
    pass


def main() -> None:
    """Runs the command line; an error of halfstep is printed as one message, without a traceback."""
    raised = None
    try:
        app(prog_name="halfstep")
    except HalfstepError as error:
        typed = re.sub(r"\b(low|products)='([\w-]+)'(?!\))", r"--\1 \2", str(error))  # keywords, as options
        print(f"halfstep: {typed}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, ScriptError) else USAGE_ERROR)
    except ScriptRaised as error:
        raised = error
    if raised is not None:  # out here, so that what the script raised has no other context
        raised.show()


if __name__ == "__main__":
    to_the_end(main)
