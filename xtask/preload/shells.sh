# needs: bash awk sed perl
# Pipes, here-documents, duplicated descriptors: shells call dup and close more often than other programs.
bash -c 'exec 7</etc/passwd 8>out; read -r line <&7; echo "$line" >&8; exec 7<&- 8>&-; wc -l < out
    for i in 1 2 3 4 5; do echo $i | (read x; echo $((x * x))); done
    while read -r a; do echo "<$a>"; done <<< "$(printf "one\ntwo\n")"
    cat < <(echo process substitution) && mapfile -t lines < <(seq 5) && echo "${lines[@]}"'
seq 2000 | awk '{ s += $1; print s > "sums" } END { close("sums"); while ((getline x < "sums") > 0) n++; print s, n }'
sed -n '3,5p;$p' sums
perl -e 'open F, "<", "sums"; local $/; my $all = <F>; print length $all, "\n"; seek F, 10, 0; sysread F, $b, 7; print $b;
    my $pid = open P, "-|", "echo child"; print <P>; close P; pipe R, W; if (!fork) { close R; syswrite W, "x" x 70000; exit }
    close W; my $n = 0; while (my $k = sysread R, $c, 5000) { $n += $k } print "$n\n"; wait'
exit 7
