"""`python -m kvmig`: the same as the command `kvmig`."""

from kvmig.console.app import main

main()
