#!/bin/bash
set -e
cd /workspace
cat > rle.c <<'C'
/*
 * Run-length coding. The coded form is a sequence of pairs of bytes: a count from 1 to 255, and the byte that is repeated
 * so often. Runs are as long as possible: a run of 300 equal bytes is (255, b) (45, b). Empty input codes to nothing.
 */
#include <stdio.h>
#include <string.h>

static void encode(void)
{
    int byte, last = EOF, count = 0;
    while ((byte = getchar()) != EOF) {
        if (count > 0 && (byte != last || count == 255)) {
            putchar(count);
            putchar(last);
            count = 0;
        }
        last = byte;
        count++;
    }
    if (count > 0) {
        putchar(count);
        putchar(last);
    }
}

static int decode(void)
{
    int count, byte;
    while ((count = getchar()) != EOF) {
        if (count == 0 || (byte = getchar()) == EOF) {
            fprintf(stderr, "rle: bad input\n");
            return 1;
        }
        while (count-- > 0)
            putchar(byte);
    }
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 2 && !strcmp(argv[1], "-e")) {
        encode();
        return 0;
    }
    if (argc == 2 && !strcmp(argv[1], "-d"))
        return decode();
    fprintf(stderr, "usage: rle -e | -d\n");
    return 2;
}
C
cc -O1 -Wall -o rle rle.c
printf 'aaaabbb' | ./rle -e | ./rle -d
