"""Options that several groups of commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Name = Annotated[str, typer.Option(help="Which cluster.", envvar="BANYAN_CLUSTER")]
Address = Annotated[
    str, typer.Option(help="HOST:PORT of routers, comma between; default: the cluster's own.")
]
ApiKey = Annotated[str, typer.Option(help="API key.", envvar="BANYAN_API_KEY", show_default=False)]
