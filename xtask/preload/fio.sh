# needs: fio
# compare: output
# Reads with every engine, and verification of the written bytes.
for engine in sync psync vsync pvsync pvsync2 mmap libaio posixaio io_uring; do
    fio --name=$engine --ioengine=$engine --rw=randrw --size=2M --bs=512-64k --bs_unaligned --verify=crc32c --iodepth=4 \
        --fallocate=none --output=/dev/null --randseed=1 || echo "$engine failed"
done
