"""`python -m rlblocks`: the command `rlblocks`, also where its script is not on the path."""
import sys

from rlblocks.people.command import command_line

if __name__ == "__main__": sys.exit(command_line())
