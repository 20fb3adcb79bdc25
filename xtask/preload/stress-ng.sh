# needs: stress-ng
# compare: output
# Children that appear and vanish, descriptors closed under other threads' feet.
for stressor in fork vfork close dup clone pipe; do
    stress-ng --quiet --$stressor 2 --$stressor-ops 400 --timeout 10 --temp-path . --oom-avoid > log 2>&1 || { echo "$stressor failed"; cat log; }
done
