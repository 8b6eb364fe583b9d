#include "greet.h"
#include <stdio.h>

int main(void)
{
    printf("%s %d\n", greeting(), answer());
    return 0;
}
