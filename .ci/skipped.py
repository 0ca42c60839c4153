"""Fails if tests that need a server were skipped although the server is installed."""

from __future__ import annotations

import glob
import shutil
import sys
import xml.etree.ElementTree as ElementTree

SERVERS = {"Redis": ("redis-server", "valkey-server"), "PostgreSQL": ("postgres",)}
PLACES = ":".join(["/usr/bin:/usr/local/bin:/usr/sbin:/usr/local/pgsql/bin", *glob.glob("/usr/lib/postgresql/*/bin")])


def main(path: str) -> int:
    reasons = [skip.get("message", "") for skip in ElementTree.parse(path).getroot().iter("skipped")]
    status = 0
    for server, binaries in SERVERS.items():
        installed = any(shutil.which(name) or shutil.which(name, path=PLACES) for name in binaries)
        missed = [reason for reason in reasons if f"no {server} server installed" in reason]
        if installed and missed:
            print(f"{len(missed)} tests were skipped for want of a {server} server, but one is installed")
            status = 1
    print(f"{len(reasons)} tests skipped")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
