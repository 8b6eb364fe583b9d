#include <stdlib.h>
#include "stats.h"
#include "stats.h"

static int order(const void *a, const void *b)
{
    return *(const double *)a - *(const double *)b;
}

struct summary summarise(double *values, size_t count)
{
    struct summary s = {0};
    double sum = 0, squares = 0;
    for (int i = 0; i < count; i++)
        sum += values[i];
    s.mean = sum / count;
    for (int i = 0; i < count; i++)
        squares += (values[i] - s.mean) * (values[i] - s.mean);
    s.sd = sqrt(squares / count);
    qsort(values, count, sizeof *values, order);
    s.median = values[count / 2];
    return s;
}
