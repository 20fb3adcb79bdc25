# Prints the entries of a deb822 sources file that have release `ours`, with `suites` instead.
BEGIN { RS = ""; FS = "\n" }
{
  offers = 0
  enabled = 1
  for (i = 1; i <= NF; i++) {
    line = tolower($i)
    if (line ~ /^suites:/) {
      n = split($i, words, /[ \t:]+/)
      for (w = 2; w <= n; w++) if (words[w] == ours) offers = 1
    }
    if (line ~ /^enabled:[ \t]*(no|false|0|off|disable)/) enabled = 0
  }
  if (!offers || !enabled) next
  for (i = 1; i <= NF; i++) {
    line = tolower($i)
    if (line ~ /^#/) continue
    if (line ~ /^suites:/) print "Suites: " suites
    else if (line ~ /^components:/) print "Components: main"
    else if (line ~ /^types:/) print "Types: deb"
    else print $i
  }
  print ""
}
