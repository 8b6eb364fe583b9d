#!/bin/bash
set -e
cd /workspace
printf '%s\n' 'CFLAGS = -O2 -Wall -Wextra -Werror' 'OBJECTS = main.o stats.o' '' 'stats: $(OBJECTS)' \
  '	$(CC) $(CFLAGS) -o $@ $(OBJECTS) -lm' '' 'main.o stats.o: stats.h' '' '.PHONY: clean' 'clean:' \
  '	rm -f stats $(OBJECTS)' > Makefile
cat > stats.h <<'C'
#ifndef STATS_H
#define STATS_H
#include <stddef.h>

struct summary {
    double mean;
    double sd;
    double median;
};

struct summary summarise(double *values, size_t count);
#endif
C
cat > stats.c <<'C'
#include "stats.h"
#include <math.h>
#include <stdlib.h>

static int order(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

struct summary summarise(double *values, size_t count)
{
    struct summary s = {0, 0, 0};
    double sum = 0, squares = 0;
    for (size_t i = 0; i < count; i++)
        sum += values[i];
    s.mean = sum / (double)count;
    for (size_t i = 0; i < count; i++)
        squares += (values[i] - s.mean) * (values[i] - s.mean);
    s.sd = sqrt(squares / (double)count);
    qsort(values, count, sizeof *values, order);
    s.median = count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
    return s;
}
C
cat > main.c <<'C'
#include "stats.h"
#include <stdio.h>
#include <stdlib.h>

int main(void)
{
    size_t count = 0, room = 0;
    double *values = NULL;
    char word[4096];
    while (scanf("%4095s", word) == 1) {
        char *end;
        double value = strtod(word, &end);
        if (*end != '\0') {
            fprintf(stderr, "bad input: %s\n", word);
            return 1;
        }
        if (count == room) {
            room = room ? room * 2 : 64;
            values = realloc(values, room * sizeof *values);
            if (!values)
                return 1;
        }
        values[count++] = value;
    }
    printf("n %zu\n", count);
    if (count) {
        struct summary s = summarise(values, count);
        printf("mean %.3f\nsd %.3f\nmedian %.3f\n", s.mean, s.sd, s.median);
    }
    free(values);
    return 0;
}
C
make && echo 1 2 3 4 | ./stats && make clean
