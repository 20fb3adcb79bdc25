# needs: cc
# compare: output
# Threads cancelled while they wait in read, readv, preadv2, fread and open.
cc -O1 -pthread -w -DHOST_ONLY -I"$SOURCE/crates/preload/tests/c" "$SOURCE/crates/preload/tests/c/cancel.c" -o cancel && ./cancel
