"""`python -m kvmig`: the same as the command `kvmig`."""

from kvmig.cli.app import main

main()
