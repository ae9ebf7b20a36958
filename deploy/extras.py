"""Print the dependencies of extras of the project (gpu,ocr) as a requirements file."""

import sys
import tomllib
from pathlib import Path

with Path(__file__).with_name("pyproject.toml").open("rb") as file:
    extras = tomllib.load(file)["project"]["optional-dependencies"]
del extras["dev"]
names = [name.strip() for name in ",".join(sys.argv[1:]).split(",") if name.strip()]
if strange := [name for name in names if name not in extras]:
    sys.exit(f"EXTRAS: there is no extra {strange[0]!r}; there are: {', '.join(extras)}")
print("\n".join(line for name in names for line in extras[name]))
