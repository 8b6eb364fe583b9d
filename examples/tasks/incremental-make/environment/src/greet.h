#include "answer.h"
const char *greeting(void);
