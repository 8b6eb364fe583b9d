/*
 * Run-length coding. The coded form is a sequence of pairs of bytes: a count from 1 to 255, and the byte that is repeated
 * so often. Runs are as long as possible: a run of 300 equal bytes is (255, b) (45, b). Empty input codes to nothing.
 */
#include <stdio.h>
#include <string.h>

static char input[4096], output[4096];

static int encode(int length)
{
    int used = 0;
    for (int i = 0; i < length;) {
        char byte = input[i];
        char count = 0;
        while (input[i] == byte) {
            count++;
            i++;
        }
        output[used++] = count;
        output[used++] = byte;
    }
    return used;
}

static int decode(int length)
{
    int used = 0;
    for (int i = 0; i <= length; i += 2)
        for (int n = 0; n < input[i]; n++)
            output[used++] = input[i + 1];
    return used;
}

int main(int argc, char **argv)
{
    int length = fread(input, 1, 65536, stdin);
    int used;
    if (!strcmp(argv[1], "-e"))
        used = encode(length);
    else
        used = decode(length);
    fwrite(output, 1, used, stdout);
    return 0;
}
