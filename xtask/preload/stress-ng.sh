# needs: stress-ng
# compare: output
# Short-lived child processes, descriptors closed while other threads use them.
for stressor in fork vfork close dup clone pipe; do
    stress-ng --quiet --$stressor 2 --$stressor-ops 400 --timeout 10 --temp-path . --oom-avoid > log 2>&1 || { echo "$stressor failed"; cat log; }
done
