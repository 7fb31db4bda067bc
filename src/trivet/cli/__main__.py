"""`python -m trivet.cli`."""

from trivet.cli import main

main()
