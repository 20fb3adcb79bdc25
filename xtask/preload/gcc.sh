# needs: gcc ar
# Compiler, assembler, linker: nested child processes, temporary files, mappings.
cat > a.c <<'EOF'
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <sys/socket.h>
int twice(int);
int main(void) { printf("%d\n", twice(21)); return 3; }
EOF
echo 'int twice(int x) { return 2 * x; }' > b.c
gcc -O2 -g -c a.c && gcc -O2 -c -pipe b.c && ar rcsD libb.a b.o && gcc -flto=1 -O2 a.c b.c -o lto -Wl,--build-id=none
gcc a.o -L. -lb -o ab -Wl,--build-id=none && cksum a.o b.o libb.a ab
gcc -E a.c | cksum && gcc -O3 -S b.c -o - | cksum
gcc -c nothing.c 2>&1 | head -n 1
./lto; ./ab
