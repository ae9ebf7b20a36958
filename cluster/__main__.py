"""``python -m cluster`` is ``sol-rl``."""

from cli.main import main

raise SystemExit(main())
