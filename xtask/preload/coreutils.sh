# needs: find sort sha256sum split tac od dd
# Thousands of small files, read in every way that coreutils uses.
mkdir tree && cd tree
seq 1 60000 > numbers
split -l 50 -a 3 numbers part.
mkdir -p a/b/c && cp part.* a/b/c && cp -r a copy && cp --sparse=always numbers sparse
find . -type f | sort > ../names
xargs -a ../names cat | sha256sum
xargs -a ../names -n 400 wc -l | tail -n 1
cat part.aab part.aac - < part.aad | tac | head -n 3
head -c 1000 numbers | tail -c 20
tail -n 2 numbers | od -c
sort -rn numbers | head -n 2
sort -k1.3 --parallel=1 -S 64K -T . numbers | sha256sum
comm -12 part.aaa a/b/c/part.aaa | uniq -c | cut -c 1-8 | paste -s
dd if=numbers bs=1000 skip=3 count=2 status=none | cksum
dd if=numbers of=direct bs=4096 iflag=fullblock conv=notrunc status=none
dd if=direct bs=4096 iflag=direct status=none 2>/dev/null | cksum
cmp numbers direct && diff -rq a copy/ && ls -R a | wc -l
shuf --random-source=numbers -n 3 numbers | tr '\n' ' '
truncate -s 1M hole && cat hole | md5sum
tee t1 t2 < part.abc | sum
rm -r copy && find . -type f | wc -l
