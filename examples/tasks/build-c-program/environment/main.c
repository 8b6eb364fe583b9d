#include <stdio.h>
#include <stdlib.h>
#include "stats.h"

int main(void)
{
    double values[100];
    size_t count = 0;
    char word[64];
    while (scanf("%63s", word) == 1)
        values[count++] = atof(word);
    printf("n %d\n", count);
    struct summary s = summarise(values, count);
    printf("mean %.3f\nsd %.3f\nmedian %.3f\n", s.mean, s.sd, s.median);
    return 0;
}
