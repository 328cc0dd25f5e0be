"""`python -m tccompile` is the command tccompile."""

from tccompile.cli.commands import tccompile

if __name__ == "__main__":
    tccompile.main(prog_name="python -m tccompile")
