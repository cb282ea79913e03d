"""What Jupyter shows of halfstep's values: the lines that `print` shows, in place of a `repr`."""

from __future__ import annotations

import html


def preformatted(text: str) -> str:
    """Returns text as HTML that keeps its lines."""
    return f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'


class InNotebooks:
    """A value that Jupyter shows as it is printed."""

    def _repr_html_(self) -> str:
        return preformatted(str(self))
