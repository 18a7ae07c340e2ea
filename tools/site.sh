#!/usr/bin/env bash
# Builds the site of docs/ strictly, opens three pages of it in headless Chromium and fails if one lacks its
# heading or its style. Pictures of them are in build/site-shots afterwards.
#
# BIN=DIR         where mkdocs is (.venv/bin, after `make docs`)
# CHROMIUM=CMD    the browser
set -euo pipefail
cd "$(dirname "$0")/.."

bin=${BIN:-.venv/bin}
shots=build/site-shots
# Page, and what its first heading begins with.
pages=("index.html=fserver" "api/fserver.html=Nodes and functions" "two-hosts.html=Two hosts and containers")

if [[ ! -x $bin/mkdocs ]]; then
  echo "site: $bin/mkdocs is not there: run \`make docs\` first, or set BIN" >&2
  exit 1
fi
browser=${CHROMIUM:-$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)}
if [[ -z $browser ]]; then
  echo "site: no Chromium: apt-get install chromium (Debian), or set CHROMIUM to the command of one" >&2
  exit 1
fi

rm -rf "$shots"
mkdir -p "$shots"
# Not with --quiet, which also hides from --strict what it is to count.
NO_MKDOCS_2_WARNING=1 "$bin/mkdocs" build --strict

# Nothing may come from elsewhere when a page is read.
if grep -rnoE --include='*.html' '<(script|img|iframe)[^>]* src="?(https?:)?//[^> ]*' build/site ||
  grep -rnoE --include='*.html' '<link[^>]* href="?(https?:)?//[^> ]*' build/site; then
  echo "site: these pages load something from elsewhere" >&2
  exit 1
fi

home=$(mktemp -d)
touch "$home/server"
"$bin/python" -u -m http.server --bind 127.0.0.1 --directory build 0 >"$home/server" 2>/dev/null &
server=$!
trap 'kill $server 2>/dev/null; wait $server 2>/dev/null || true; rm -rf "$home"' EXIT
port=
for _ in {1..100}; do
  port=$(sed -nE 's/.* port ([0-9]+) .*/\1/p' "$home/server")
  [[ -n $port ]] && break
  sleep 0.1
done
[[ -n $port ]] || {
  echo "site: python -m http.server did not start" >&2
  exit 1
}

open() {
  HOME=$home timeout 60 "$browser" --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars \
    --user-data-dir="$home/${profile:-light}" --virtual-time-budget=10000 "$@" 2>>"$home/log"
}

# A page of its own looks at the page in a frame: the text of the heading, and a color that only the theme's
# style gives to the bar at the top.
cat >"$shots/probe.html" <<'HTML'
<iframe id="f" width="1200" height="800"></iframe>
<pre id="found"></pre>
<script>
const f = document.getElementById("f");
f.onload = () => {
  const d = f.contentDocument, h = d.querySelector("article h1"), top = d.querySelector(".md-header");
  const text = h ? h.firstChild.textContent.trim() : "none";
  const style = top ? f.contentWindow.getComputedStyle(top).backgroundColor : "none";
  const position = top ? f.contentWindow.getComputedStyle(top).position : "none";
  document.getElementById("found").textContent = `[heading:${text}][bar:${style} ${position}]`;
};
f.src = "../site/" + location.hash.slice(1);
</script>
HTML

# The theme keeps the choice of colors, by the path of the site.
cat >"$shots/dark.html" <<'HTML'
<script>
const color = { media: "(prefers-color-scheme: dark)", scheme: "slate", primary: "teal", accent: "teal" };
localStorage.setItem("/site/.__palette", JSON.stringify({ index: 1, color }));
location.replace("../site/" + location.hash.slice(1));
</script>
HTML

failed=0
for entry in "${pages[@]}"; do
  page=${entry%%=*} heading=${entry#*=}
  name=${page//\//-}
  name=${name%.html}
  at=http://127.0.0.1:$port
  found=$(open --dump-dom "$at/site-shots/probe.html#$page" | grep -o '^<pre.*</pre>' | sed 's/<[^>]*>//g' || true)
  if [[ $found != "[heading:$heading"* ]]; then
    echo "site: $page: want a heading that begins with \"$heading\", the browser found: ${found:-nothing}" >&2
    failed=1
  elif [[ $found != *" sticky]" || $found == *"rgba(0, 0, 0, 0)"* ]]; then
    echo "site: $page: its style is missing, the browser found: $found" >&2
    failed=1
  fi
  open --window-size=1400,1000 --screenshot="$shots/$name.png" "$at/site/$page" >/dev/null || failed=1
  open --window-size=500,1000 --screenshot="$shots/$name-narrow.png" "$at/site/$page" >/dev/null || failed=1
  profile=dark open --window-size=1400,1000 --screenshot="$shots/$name-dark.png" "$at/site-shots/dark.html#$page" \
    >/dev/null || failed=1
  for shot in "$shots/$name"{,-narrow,-dark}.png; do
    if [[ ! -s $shot ]]; then
      echo "site: $shot was not made; the browser said:" >&2
      tail -5 "$home/log" >&2
      failed=1
    fi
  done
done
rm -f "$shots/probe.html" "$shots/dark.html"
((failed)) || echo "site: ${#pages[@]} pages are in order, pictures in $shots"
exit $failed
