"""A page in headless Chromium, without any driver: a script at its end uses the controls and leaves in the page what it saw."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSER = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")

# Before anything else of the page runs.
WATCH = """<script>
window.seen = [];
addEventListener("error", (e) => seen.push("error: " + e.message));
addEventListener("unhandledrejection", (e) => seen.push("rejected: " + e.reason));
addEventListener("securitypolicyviolation", (e) => seen.push("blocked: " + e.violatedDirective));
for (const kind of ["error", "warn"]) console[kind] = (...words) => seen.push(kind + ": " + words.join(" "));
</script>"""

TELL = """<script>
(function () {
  let found;
  try { found = (function () { %s })(); } catch (e) { seen.push("test: " + e.message); }
  const pre = document.createElement("pre");
  pre.id = "found";
  pre.textContent = JSON.stringify({ seen: seen, found: found });
  document.body.appendChild(pre);
})();
</script>"""


def use(page: Path, script: str, width: int = 1280, dark: bool = False) -> Any:
    """What ``script`` returns at the end of a page; fails where the page told an error or asked for anything from outside."""
    assert BROWSER is not None
    text = page.read_text(encoding="utf-8").replace('<meta charset="utf-8">', '<meta charset="utf-8">' + WATCH)
    copy = page.with_name(f"used-{width}.html")
    copy.write_text(text.replace("</body>", TELL % script + "</body>"), encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=3000"]
    command += [f"--window-size={width},900", f"--user-data-dir={page.parent / 'profile'}", "--dump-dom"]
    command += ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run([*command, copy.as_uri()], capture_output=True, text=True, timeout=100, check=True)
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match is not None, done.stderr[-2000:]
    told = json.loads(html.unescape(match[1]))
    assert told["seen"] == []
    return told["found"]
