"""Commands for a job that is running: probe start | stop | status, watch, alert, and replay of what it captured."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from .cli_text import err, fmt, number, out, site_name, stop

probe_app = typer.Typer(help="Start, stop or look at the probes of a running job.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Put these commands into the command line."""
    for command in (watch, alert, replay):
        app.command()(command)
    app.add_typer(probe_app, name="probe")


def watch(
    run: Annotated[Path, typer.Argument(help="A dumps folder, an arm folder or a run folder that is being written.")],
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0: any free one.")] = 8734,
    every: Annotated[float, typer.Option(help="Seconds between looks for new dumps.")] = 5.0,
) -> None:
    """Serve the report of a running job on this machine, built again as dumps land. Ctrl-C ends it."""
    from .review import serve
    from .review.report import build_payload, render
    from .review.runs import discover

    if not run.is_dir():
        stop(f"{run} is not a folder; give the run folder of the job")

    def build() -> str:
        problems: list[Any] = []
        return render(build_payload(discover([run], problems), problems, title=f"Live: {run.name or run}"))

    try:
        server = serve.server(run, build, port, every)
    except OSError as error:
        stop(f"port {port} cannot be used ({error.strerror}); choose another with --port")
    out.print(f"watching {run} at http://127.0.0.1:{server.server_address[1]}/ (Ctrl-C ends it)")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


def alert(
    run: Annotated[Path, typer.Argument(help="A dumps folder, an arm folder or a run folder that is being written.")],
    above: Annotated[
        list[str] | None,
        typer.Option(help="MEASURE=VALUE; may be repeated. Default: row_sum_pre=1e-3, key_col_sum=1e-2."),
    ] = None,
    alert_cmd: Annotated[
        str | None,
        typer.Option(
            help="Shell command to run for each new crossing, with DM_SITE, DM_VALUE, ... in its environment."
        ),
    ] = None,
    every: Annotated[float | None, typer.Option(help="Look again every so many seconds; default: look once.")] = None,
) -> None:
    """Say which layers are past a line at the newest probed step; exit 1 if any is (looking once)."""
    from .dump import DumpError
    from .review import alert as alarm

    told: set[tuple[str, str, str]] = set()
    try:
        limits = alarm.lines(above or [])
        while True:
            found = alarm.crossings(run, limits)
            for c in found:
                if (c.arm, c.site, c.measure) in told:
                    continue
                told.add((c.arm, c.site, c.measure))
                out.print(
                    f"[bold red]above[/] {c.arm}: {site_name(c.site)} at step {c.step}: {c.measure} = {fmt(c.value)}, line {c.limit:g}"
                )
                if alert_cmd is not None and (code := alarm.tell(alert_cmd, c)) != 0:
                    err.print(f"the alert command ended with exit code {code}")
            if every is None:
                break
            time.sleep(every)
    except (ValueError, DumpError) as error:
        stop(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(1 if told else 0) from None
    if not found:
        out.print("no layer is past a line")
    raise typer.Exit(1 if found else 0)


def replay(
    captures: Annotated[list[Path], typer.Argument(help="A dumps folder, its captures folder, or a capture file.")],
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines instead of tables.")] = False,
) -> None:
    """Replay captured operands: what stale, consistent, matched and stock would have given. Needs torch."""
    try:
        from .replay import ARMS, load
        from .replay import replay as run
    except ModuleNotFoundError as error:
        stop(f"replay needs {error.name}, which is not installed")
    import numpy as np

    from .dump import DumpError, find_dumps
    from .review.measure import MEASURES

    shown = ("median", "gap", "col", "dq", "dk", "dv")
    files = []
    for path in captures:
        folder = next((f for f in (path / "captures", path / "dumps" / "captures") if f.is_dir()), path)
        files += [path] if path.is_file() else [f.path for f in find_dumps(folder)]
    if not files:
        stop(f"{captures[0]} holds no captures; ask a job for them with `dm-plugin probe start RUN --replay`")
    for file in files:
        try:
            metadata, found = load(file)
        except DumpError as error:
            stop(str(error))
        for site, capture in found.items():
            fields = {key: np.asarray(x)[None] for key, x in run(capture).items()}
            rows = {arm: [float(MEASURES[f"replay_{arm}.{m}"].form(fields)[0]) for m in shown] for arm in ARMS}
            if as_json:
                for arm, values in rows.items():
                    numbers = dict(zip(shown, map(number, values), strict=True))
                    print(json.dumps({"file": str(file), "site": site, "arm": arm, **numbers}))
                continue
            ran = metadata.get("dm_plugin.backend", "")
            tokens, heads, dim = capture.q.shape
            where = f"{site_name(site)}, step {metadata['dm_plugin.step']}: {tokens} tokens, {heads} query heads, head dim {dim}"
            out.print(f"{where}, from a job that ran {ran}", style="bold", soft_wrap=True)
            table = Table("arm", "row", "delta gap", "key column", "dQ error", "dK error", "dV error")
            for arm, values in rows.items():
                table.add_row(arm, *map(fmt, values))
            out.print(table)
    if not as_json:
        for m in shown:
            out.print(f"  {MEASURES[f'replay_stale.{m}'].definition}", soft_wrap=True)


Run = Annotated[Path, typer.Argument(help="The running job's control folder (where its probe_request.json goes).")]


@probe_app.command("start")
def probe_start(
    run: Run,
    steps: Annotated[int | None, typer.Option(help="How many steps; default: until stopped.")] = None,
    start_step: Annotated[int | None, typer.Option(help="First step; default: the next one each rank reaches.")] = None,
    layers: Annotated[str | None, typer.Option(help="Global layer numbers from 0, like 0-3,17; default: all.")] = None,
    probes: Annotated[str | None, typer.Option(help="Comma-separated probes; default: all but replay.")] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Also capture operands and replay them through every delta.")
    ] = False,
) -> None:
    """Ask the job to probe its next steps."""
    wanted = [p.strip() for p in probes.split(",")] if probes else None
    if replay:
        from .config import ON_REQUEST, PROBES

        wanted = [*(wanted or PROBES), *(p for p in ON_REQUEST if p not in (wanted or ()))]
    _send(run, "start", steps=steps, start_step=start_step, layers=layers, probes=wanted)


@probe_app.command("stop")
def probe_stop(run: Run) -> None:
    """Ask the job to stop probing."""
    _send(run, "stop")


@probe_app.command("status")
def probe_status(run: Run) -> None:
    """Show the request and what each rank made of it."""
    from . import control

    if not run.is_dir():
        stop(f"{run} is not a folder; give the control folder of the running job")
    request, ranks = control.status(run)
    out.print(f"request: {json.dumps(request) if request else 'none'}")
    table = Table("rank", "state", "at step", "request", "queued", "written", "lost")
    for r in ranks:
        table.add_row(*(str(r.get(k)) for k in ("rank", "state", "step", "request", "queued", "written", "lost")))
    out.print(
        table if ranks else "no rank has reported yet: a job looks at the start of its next step, a finished one never"
    )


def _send(run: Path, action: str, **options: Any) -> None:
    from . import control

    if not run.is_dir():
        stop(f"{run} is not a folder; give the control folder of the running job")
    try:
        request = control.send(run, action, **options)
    except ValueError as error:
        stop(str(error))
    except OSError as error:
        stop(f"{run} cannot be written ({error.strerror}); the job was not asked")
    out.print(f"asked the job in {run} to {action} (request {request.id}); ranks look at the start of their next step")
