"""``python -m cluster`` is ``sol-rl``."""

from cluster.cli import main

raise SystemExit(main())
