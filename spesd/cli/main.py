"""The command line: arguments in, text or JSON and an exit code out. No logic lives here.

stdout is the answer, stderr is everything else. Exit codes: 0 done, 1 failed, 2 wrong use. Heavy
imports happen inside the commands, so that `spesd --help` answers at once.
"""

import sys
from pathlib import Path
from typing import Any

import click

from spesd import __version__
from spesd.errors import SpesdError

HOME = click.option("--home", type=click.Path(path_type=Path), help="Folder of this peer.")
BOOTSTRAP = click.option(
    "--bootstrap", multiple=True, metavar="ADDR", help="Address of any peer; repeatable."
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="spesd")
def cli() -> None:
    """Pretrain one Mixture-of-Experts model together, with nobody in charge."""


@cli.command()
@click.option("--preset", required=True, help="tiny, small, 1b, 2b, 7b or 9b.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option(
    "--scale", type=float, default=1.0, help="Below 1: the same shape, narrower and shallower."
)
def new(preset: str, output: Path, scale: float) -> None:
    """Write a commented run config."""
    from spesd.cli.files import write_preset

    write_preset(preset, output, scale)
    click.echo(f"spesd start {output}")


@cli.command()
@click.argument("run_toml", type=click.Path(path_type=Path))
@BOOTSTRAP
@click.option("--listen", multiple=True, metavar="MADDR", help="Multiaddr to listen on.")
@click.option("--profile", help="A class of machine (peers/profiles).")
@click.option("--vram", metavar="SIZE", help="Memory to use, such as 8GB.")
@click.option("--own", type=click.IntRange(min=1), help="Experts to own.")
@click.option("--device", help="cuda:0, cpu, ...")
@HOME
def start(run_toml: Path, bootstrap: tuple[str, ...], home: Path | None, **options: Any) -> None:
    """Found a run: prints the line that a volunteer types."""
    from spesd.cli.peer import run_peer

    run_peer(home=home, bootstrap=bootstrap, run_toml=run_toml, run_name=None, options=options)


@cli.command()
@BOOTSTRAP
@click.option("--run", "run_name", metavar="NAME", help="Which run, if there are several.")
@click.option("--listen", multiple=True, metavar="MADDR", help="Multiaddr to listen on.")
@click.option("--profile", help="A class of machine (peers/profiles).")
@click.option("--vram", metavar="SIZE", help="Memory to use, such as 8GB.")
@click.option("--own", type=click.IntRange(min=1), help="Experts to own.")
@click.option("--device", help="cuda:0, cpu, ...")
@HOME
def join(
    bootstrap: tuple[str, ...], run_name: str | None, home: Path | None, **options: Any
) -> None:
    """Join a run as a volunteer."""
    from spesd.cli.peer import run_peer

    run_peer(home=home, bootstrap=bootstrap, run_toml=None, run_name=run_name, options=options)


@cli.command()
@BOOTSTRAP
@click.option("--run", "run_name", metavar="NAME", help="Which run, if there are several.")
@JSON
@click.option("--watch", is_flag=True, help="Show it again every few seconds.")
@HOME
def status(
    bootstrap: tuple[str, ...],
    run_name: str | None,
    as_json: bool,
    watch: bool,
    home: Path | None,
) -> None:
    """Show the swarm, from the local daemon or, with --bootstrap, as a mere observer."""
    from spesd.cli.observe import show_status

    show_status(bootstrap, run_name, home=home, as_json=as_json, watch=watch)


def _tell(home: Path | None, wish: str) -> None:
    from spesd.daemon.control import ask
    from spesd.daemon.home import Home, default_home

    place = home or default_home()
    click.echo(ask(Home(place).socket, place, {"do": wish})["done"])


@cli.command()
@HOME
def leave(home: Path | None) -> None:
    """Have the local daemon finish, save and leave."""
    _tell(home, "leave")


@cli.command()
@HOME
def pause(home: Path | None) -> None:
    """Stop training; go on serving what others need."""
    _tell(home, "pause")


@cli.command()
@HOME
def resume(home: Path | None) -> None:
    """Train again after a pause."""
    _tell(home, "resume")


@cli.command()
@BOOTSTRAP
@click.option("--listen", multiple=True, metavar="MADDR", help="Multiaddr to listen on.")
@HOME
def bootstrap(bootstrap: tuple[str, ...], listen: tuple[str, ...], home: Path | None) -> None:
    """Be a meeting point: a DHT node and relay that trains nothing."""
    from spesd.cli.peer import run_bootstrap

    run_bootstrap(home=home, bootstrap=bootstrap, listen=listen)


@cli.command()
@click.argument("run_toml", type=click.Path(path_type=Path))
@click.option("--profile", help="A class of machine (peers/profiles).")
@click.option("--vram", metavar="SIZE", help="Memory to use, such as 8GB.")
@click.option("--own", type=click.IntRange(min=1), help="Experts to own.")
@click.option("--device", help="cuda:0, cpu, ...")
@click.option("--uplink", metavar="RATE", help="Such as 20Mbit.")
@click.option("--downlink", metavar="RATE", help="Such as 100Mbit.")
@click.option("--peers", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--speed", type=click.FloatRange(min=1.0), help="Tokens a second of this machine.")
@JSON
@HOME
def plan(run_toml: Path, as_json: bool, profile: str | None, **options: Any) -> None:
    """Show the memory and traffic of a peer, before anything is downloaded."""
    from spesd.cli.plan import show_plan

    show_plan(run_toml, as_json=as_json, profile=profile, **options)


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--prompt", default="", help="Text to continue.")
@click.option("--tokens", default=200, show_default=True, type=click.IntRange(1, 100_000))
@click.option("--temperature", default=0.8, show_default=True, type=click.FloatRange(0.0, 10.0))
@click.option("--top-p", default=0.95, show_default=True, type=click.FloatRange(0.0, 1.0))
@click.option("--seed", default=0, show_default=True)
def generate(checkpoint: Path, prompt: str, tokens: int, **sampling: Any) -> None:
    """Continue a prompt with a checkpoint (a home, a run's folder, or a manifest)."""
    from spesd.cli.files import print_sample

    print_sample(checkpoint, prompt, tokens, **sampling)


@cli.command("eval")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--data", multiple=True, metavar="FILE|GLOB", help="Text or JSONL; repeatable.")
@click.option("--field", default="text", show_default=True, help="Where a JSONL row has its text.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Of each text at most.")
@click.option("--tasks", metavar="A,B", help="Tasks of the lm-evaluation-harness (spesd[eval]).")
@click.option("--limit", type=click.IntRange(min=1), help="Examples of each task at most.")
@click.option("--task-path", type=click.Path(path_type=Path), help="Folder of your own tasks.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda:0, ...")
@JSON
def evaluate(checkpoint: Path, **options: Any) -> None:
    """Measure a checkpoint: perplexity on its held-out text or on yours, or scores on tasks."""
    from spesd.cli import evaluate as command

    command.evaluate(checkpoint, **options)


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True)
def export(checkpoint: Path, out: Path, dtype: str) -> None:
    """Write a checkpoint as a Hugging Face model directory."""
    from spesd.cli.files import export_checkpoint

    click.echo(str(export_checkpoint(checkpoint, out, dtype)))


@cli.command("import")
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--upcycle", is_flag=True, help="Make experts of a dense Qwen3 or Llama model.")
@click.option("--experts", type=click.IntRange(1, 4096), help="Experts to make.  [default: 8]")
@click.option("--top-k", type=click.IntRange(min=1), help="Experts of a token.  [default: 2]")
@click.option("--noise-std", type=float, help="Noise on the experts.  [default: 0.001]")
@click.option("--noise-fraction", type=float, help="Share of values noised.  [default: 0.5]")
@click.option(
    "--router-init",
    type=click.Choice(["scaled_normal", "normal", "zeros"]),
    help="The router's first values.  [default: scaled_normal]",
)
@click.option("--router-std", type=float, help="Of scaled_normal.  [default: 0.02]")
@click.option("--seed", type=click.IntRange(min=0), help="Of noise and router.  [default: 0]")
def import_(model: Path, out: Path, **options: Any) -> None:
    """Make a run that starts from a Hugging Face model (Olmoe, Qwen3Moe, Mixtral, or dense)."""
    from spesd.cli.importing import import_model

    import_model(model, out, **options)


@cli.command()
@click.argument("name", type=click.Choice(["step", "memory", "learning"]))
@click.option("--size", type=click.Choice(["41M", "158M"]), help="Model of step and memory.")
@click.option("--quick", is_flag=True, help="Less of everything: shows that it runs.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the JSON there too.")
@JSON
def bench(name: str, size: str | None, quick: bool, output: Path | None, as_json: bool) -> None:
    """Measure steps or memory beside transformers, or how well ways of training together learn."""
    from spesd.cli.bench import run_bench

    run_bench(name, size=size, quick=quick, as_json=as_json, out=output)


def main() -> None:
    """Run a command; the one place where an error becomes text and an exit code."""
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except SpesdError as error:
        click.echo(f"spesd: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)


if __name__ == "__main__":
    main()
