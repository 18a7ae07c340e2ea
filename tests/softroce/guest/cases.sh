#!/bin/bash
# Runs cases of tests/softroce/cases in the machine: those that are named, or all but *_long. Exits with 1 if one fails.
cd "$(dirname "$0")/../../.." || exit 1
export share=${SOFTROCE_SHARE:-$PWD/build/softroce/share} python=${SOFTROCE_PYTHON:-python3}
export transports=${SOFTROCE_TRANSPORTS:-tcp}
failed=() ran=0
# The list has a descriptor of its own: a case may read its standard input.
while read -r -u 7 name seconds command; do
  [[ -n $name && $name != "#"* ]] || continue
  if (($#)); then [[ " $* " == *" $name "* ]]; else [[ $name != *_long ]]; fi || continue
  ran=$((ran + 1))
  echo "case $name" >"$SOFTROCE_STATUS"
  printf -- '---- %s\n' "$name"
  begin=$EPOCHREALTIME
  timeout --kill-after 5 "$seconds" bash -c "$command" </dev/null 7<&-
  result=$?
  took=$(((${EPOCHREALTIME/./} - ${begin/./}) / 100000))
  took=${took%?}.${took: -1}
  case $result in
  0) echo "softroce: $name passed in ${took/#./0.} s" ;;
  124 | 137) echo "softroce: $name FAILED: not done in $seconds s" && failed+=("$name") ;;
  *) echo "softroce: $name FAILED in ${took/#./0.} s: exit status $result" && failed+=("$name") ;;
  esac
done 7<tests/softroce/cases
if ((${#failed[@]})); then
  echo "softroce: failed: ${failed[*]}"
  exit 1
fi
echo "softroce: $ran cases passed"
